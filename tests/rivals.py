"""Published rivals with few steps, and with general text in place of what the model would write."""

TEXTS = ((5, 6, 7, 8), (9, 8, 4))
SHORT_RIVALS = {
    "balanced_subnet": {"steps": 2, "texts": TEXTS},
    "adversarial_hard_concrete": {"steps": 2, "texts": TEXTS, "learning_rate": 0.05},
    "selective_synaptic_dampening": {"texts": TEXTS},
    "selective_pruning": {"texts": TEXTS},
}
UNLEARNED = ("balanced_subnet", "adversarial_hard_concrete")
