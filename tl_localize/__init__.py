"""Which MLP neurons make a language model recite a text, and what happens when they are ablated.

The public names are those of ``__init__.pyi``. Each is imported when it is first used, so that
``tl-localize --help`` does not wait for torch.
"""

import os
import sys

import lazy_loader

# Threads of OpenMP that wait must not spin, or two programs on one machine take turns in waiting.
# It is read when torch is imported; where that has happened nothing can be done.
if "torch" not in sys.modules:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
