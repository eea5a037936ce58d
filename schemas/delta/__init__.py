"""Weights on the wire: what is sent of them, how it is proved, and the hash that names their state.

A delta is lossless: it decodes, beside its base, to overwrites (positions and new bits) and never adds, so writing it
twice is writing it once. Whether base and result are the right ones is proved before the first write.
docs/deltas.md describes the bytes.
"""

from .chunks import DELTA as DELTA
from .chunks import PATH as PATH
from .chunks import SNAPSHOT as SNAPSHOT
from .chunks import check_chunks as check_chunks
from .chunks import decode_chunks as decode_chunks
from .chunks import encode_delta as encode_delta
from .chunks import encode_snapshot as encode_snapshot
from .chunks import is_intact as is_intact
from .plain import CHUNK_BYTES as CHUNK_BYTES
from .state import Bits as Bits
from .state import Change as Change
from .state import Changes as Changes
from .state import Overwrites as Overwrites
from .state import Piece as Piece
from .state import State as State
from .state import Tensor as Tensor
from .state import as_state as as_state
from .state import changed as changed
from .state import copy_state as copy_state
from .state import diff as diff
from .state import elements as elements
from .state import put as put
from .state import write as write
from .state import write_pieces as write_pieces
from .statehash import HASH_ALGORITHM as HASH_ALGORITHM
from .statehash import TREE_ALGORITHM as TREE_ALGORITHM
from .statehash import Sums as Sums
from .statehash import combined as combined
from .statehash import moved as moved
from .statehash import state_hash as state_hash
from .statehash import state_sums as state_sums
from .statehash import tree_hash as tree_hash
from .statehash import updated_hash as updated_hash
from .verify import damage as damage
from .verify import decode_verified as decode_verified
from .verify import verify as verify
from .verify import verify_and_apply as verify_and_apply
