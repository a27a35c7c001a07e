# Written by cffi out of the public headers (python/build_api.py): names and types are those of include/qeffect/.
from typing import Any

ffi: Any
lib: Any
