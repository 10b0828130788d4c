"""``python -m tl_localize`` is ``tl-localize``."""

import sys

from tl_localize.cli import main

if __name__ == "__main__":
    sys.exit(main())
