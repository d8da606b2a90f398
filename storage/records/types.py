"""Array types of records, and plain JSON."""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Int8: TypeAlias = NDArray[np.int8]
Int32: TypeAlias = NDArray[np.int32]
Int64: TypeAlias = NDArray[np.int64]
Float32: TypeAlias = NDArray[np.float32]
Bool: TypeAlias = NDArray[np.bool_]
Json: TypeAlias = dict[str, Any]
