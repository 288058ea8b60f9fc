"""Where do comparisons with other implementations run? In an environment of their own (`pip install -e '.[peer]'`); elsewhere this
folder holds no tests."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("transformers") else ["test_*.py"]
