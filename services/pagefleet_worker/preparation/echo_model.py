"""The model of the EchoEngine: no weights, and a tokenizer whose id of a byte is that byte."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pagefleet.byte_alphabet import CHARACTER_OF_BYTE
from pagefleet.manifest import Weights
from pagefleet_worker.model_files import ModelFiles

_SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def echo_model() -> ModelFiles:
    """256 bytes and four special tokens, ChatML, 4,096 tokens at most."""
    tokenizer = Tokenizer(
        models.BPE(
            vocab={character: byte for byte, character in enumerate(CHARACTER_OF_BYTE)}, merges=[]
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in _SPECIAL_TOKENS]
    )
    config = {
        "model_type": "echo",
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": 4096,
    }
    return ModelFiles(
        name="echo",
        config=config,
        tokenizer=tokenizer,
        weights=Weights("none"),
        special_tokens={"bos_token": "<|bos|>", "eos_token": "<|eos|>"},
        chat_template=_CHAT_TEMPLATE,
        end_of_turn_ids=(len(CHARACTER_OF_BYTE) + _SPECIAL_TOKENS.index("<|im_end|>"),),
    )
