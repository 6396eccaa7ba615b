"""bespoke with its products in bfloat16; parameters, sums and what travels stay float32."""

from peers.bespoke import Peer as InFloat32


class Peer(InFloat32):
    precision = "bf16"
