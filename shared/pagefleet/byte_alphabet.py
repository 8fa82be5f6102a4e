"""The alphabet of byte-level BPE: one printable character for each of the 256 bytes.

Radford et al., "Language Models are Unsupervised Multitask Learners" (GPT-2), section 2.2 and its
published encoder: bytes that are printable in Latin-1 stand for themselves, and the others, in
order, are the characters from U+0100 on.
"""

_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_SHIFTED = [byte for byte in range(256) if byte not in _PRINTABLE]

CHARACTER_OF_BYTE = tuple(
    chr(byte if byte in _PRINTABLE else 0x100 + _SHIFTED.index(byte)) for byte in range(256)
)
BYTE_OF_CHARACTER = {character: byte for byte, character in enumerate(CHARACTER_OF_BYTE)}
