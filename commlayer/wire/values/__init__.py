"""Values on the wire: trees of plain values and tensors, without pickle.

A tree is written in pre-order as one flat msgpack array of tokens, so that no
decoder recurses over what a peer sent and no claimed size allocates anything.
None, bool, 64-bit int, float and str are their own tokens; everything else
begins with an extension token whose code says what follows:

==============  ==========================  ==================================
code            data of the extension       tokens that follow
==============  ==========================  ==================================
list, tuple,    number of items             the items
set, frozenset,
size
dict            number of entries           the keys, then the values
object          number of fields, class     the names of the fields, the values
encoded         1, class                    what its `encode` returned
member          1, class                    name (a flag: number) of the member
tensor          index of the tensor         none
array           3                           NumPy dtype, shape, bytes
scalar          2                           NumPy dtype, bytes
bytes, text,    the value                   none
integer,
complex, dtype,
device, pickle
==============  ==========================  ==================================

Types are exact: a subclass of a supported type is not one of them, but any mapping
is written as a dict.  What `commlayer.wire.values.standard` lists is encoded.  A tensor
object that occurs twice is sent once and arrives as one object; any other
shared object arrives as copies.
"""

from commlayer.wire.values.packing import pack
from commlayer.wire.values.parsing import Parsed, parse
from commlayer.wire.values.registered import register
from commlayer.wire.values.standard import register_standard

register_standard()

__all__ = ["Parsed", "pack", "parse", "register"]
