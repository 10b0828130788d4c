"""``python -m tl_localize`` is ``tl-localize``."""

import sys

from tl_localize.cli import main

sys.exit(main())
