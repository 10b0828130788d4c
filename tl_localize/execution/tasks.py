"""What is to be computed, as plain data: a task and everything its numbers depend on, and a plan,
which is a list of tasks.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tl_localize.identity import identity

FORMAT = 6  # of records and plans; part of every key
Json = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Task:
    """A computation whose result is one record.

    Args:
        kind: what is computed, such as ``"scores"``; the folder of its record.
        inputs: everything that its numbers depend on beside its needs, as JSON takes it.
        needs: tasks whose records it is computed from.
        label: the method, as tables call it, or what else is computed.
        name: of the sentence, group, target or chunk that it is about.
        index: its place in tables.
        ratio: its place in tables, before the index.
        group: one process computes the tasks of a group one after the other, because they share
            needs. By default the task is alone.
        weight: about how many forward passes of one text it takes: for the share of a run that is
            done, for shards of about the same weight, and for the time left where no task of its
            label is done.

    >>> task = Task("scores", {"sequence": "s0", "method": "Activations()"})
    >>> task.key == Task("scores", {"method": "Activations()", "sequence": "s0"}).key, len(task.key)
    (True, 32)
    """

    kind: str
    inputs: Mapping[str, Any]
    needs: "tuple[Task, ...]" = ()
    label: str = ""
    name: str = ""
    index: int = 0
    ratio: float = 0.0
    group: str = ""
    weight: float = 1.0

    @cached_property
    def key(self) -> str:
        """Hash of its kind, its inputs and its needs: 32 hexadecimal digits."""
        return digest_of(
            {
                "format": FORMAT,
                "kind": self.kind,
                "inputs": self.inputs,
                "needs": [need.key for need in self.needs],
            }
        )

    @property
    def file(self) -> str:
        """Name of its record in a results folder."""
        return f"records/{self.kind}/{self.key}.safetensors"


@dataclass(frozen=True, eq=False)
class Record:
    """The result of a task.

    Args:
        value: the result: rows as JSON takes them, or an object that can be saved, such as an
            injection.
        about: how it was made: versions, device, threads, seconds, peak memory.

    >>> Record({"frame": [{"recall": 0.5}]}).value["frame"]
    [{'recall': 0.5}]
    """

    value: Any
    about: Json = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Plan:
    """What a run is asked for: its tasks, and what other runs into the same folder must agree with.

    Args:
        benchmark: ``"inj"``, ``"del"`` or ``"collect"``.
        settings: the same in all plans of a folder.
        parts: sentences, targets or chunks; plans of a folder agree on those that both have.
        methods: label -> ``described`` method; plans of a folder agree on those that both have.
        tasks: those whose records make the tables; they lead to all others by their needs.
        scope: plans of different scopes, such as different ratios of INJ, may differ in ``scoped``
            and ``methods``.
        grows: what a later plan may add, for the error message.

    >>> Plan("inj", {"seed": 0}, [], {}, []).contradictions(Plan("inj", {"seed": 1}, [], {}, []))
    ['seed: 1 in the folder, 0 now']
    """

    benchmark: str
    settings: Json
    parts: list[Any]
    methods: Json
    tasks: list[Task]
    scope: str = ""
    scoped: Json = field(default_factory=dict)
    grows: str = "parts, methods and ratios"

    def contradictions(self, old: "Plan") -> list[str]:
        """What differs from an older plan of the same folder and may not."""
        alike = old.scope == self.scope
        before, now = (
            {"benchmark": one.benchmark, **one.settings, **(one.scoped if alike else {})}
            for one in (old, self)
        )
        parts = zip(old.parts, self.parts, strict=False)
        pairs = [(name, before.get(name), now.get(name)) for name in before | now]
        pairs += [(f"part {i}", *both) for i, both in enumerate(parts)]
        if alike:
            shared = old.methods.keys() & self.methods
            pairs += [(f"methods.{one}", old.methods[one], self.methods[one]) for one in shared]
        return [
            f"{name}: {one} in the folder, {other} now"
            for name, one, other in pairs
            if canonical(one) != canonical(other)
        ]

    def to_json(self) -> Json:
        """The plan as JSON takes it: a need stands as the number of its task in the list, and keys
        stand there so that nobody hashes them again.
        """
        everything = list(closure(self.tasks))
        numbers = {task.key: i for i, task in enumerate(everything)}
        tasks = [
            {**vars(task), "needs": [numbers[need.key] for need in task.needs]}
            for task in everything
        ]
        return {**vars(self), "tasks": tasks, "results": [numbers[task.key] for task in self.tasks]}

    @classmethod
    def from_json(cls, value: Json) -> "Plan":
        """The plan of such JSON."""
        tasks: list[Task] = []
        for one in value.pop("tasks"):
            key = one.pop("key")
            one["needs"] = tuple(tasks[i] for i in one["needs"])
            task = Task(**one)
            vars(task)["key"] = key
            tasks.append(task)
        return cls(tasks=[tasks[i] for i in value.pop("results")], **value)


def described(value: Any) -> Any:
    """A setting for keys and plans: its ``identity``. What has none, such as a function, is
    described in a way that holds in this process alone; a run with a store refuses it.
    """
    try:
        return identity(value)
    except ValueError:
        return {"only here": [repr(value), id(value)]}


def closure(tasks: Iterable[Task], seen: set[str] | None = None) -> Iterator[Task]:
    """Tasks and everything that they need, needs first, each once."""
    seen = set() if seen is None else seen
    for task in tasks:
        if task.key not in seen:
            yield from closure(task.needs, seen)
            seen.add(task.key)
            yield task


def tasks_of(plans: Sequence[Plan]) -> list[Task]:
    """The tasks of all plans of a folder in the order of tables: by ratio, part and method. Of
    tasks that mean the same cell the newest counts.
    """
    found = {
        (task.ratio, task.index, task.kind, task.label): task
        for plan in plans
        for task in plan.tasks
    }
    ratios = list(dict.fromkeys(task.ratio for task in found.values()))
    labels = list(dict.fromkeys(task.label for task in found.values()))
    return sorted(
        found.values(),
        key=lambda task: (ratios.index(task.ratio), task.index, labels.index(task.label)),
    )


def canonical(value: Any) -> str:
    """JSON that is the same for the same content."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str)


def digest_of(value: Any) -> str:
    """A hash of content: 32 hexadecimal digits."""
    return hashlib.sha256(canonical(value).encode(errors="surrogatepass")).hexdigest()[:32]


def hash_tensors(digest: Any, tensors: Mapping[str, Tensor]) -> None:
    """Add tensors to a hash: names, shapes and all bits."""
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().cpu().contiguous().flatten()
        digest.update(flat.view(torch.uint8).numpy())
