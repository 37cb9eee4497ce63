"""The defaults of a probe."""

from transformers import LlamaConfig, Qwen3Config

from hybridize.probing.options import make_options, state_window


def test_the_default_window_takes_the_bytes_of_a_state():
    """8 D^2 bytes per query head against 4 D per token and key head."""
    smol = LlamaConfig(hidden_size=576, num_attention_heads=9, num_key_value_heads=3)
    qwen = Qwen3Config(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
    assert state_window(smol) == 384 == 9 * 8 * 64**2 // (3 * 4 * 64)
    assert state_window(qwen) == 1024
    assert make_options(smol, "m", methods=["swa"]).windows == (384,)
    assert make_options(smol, "m", context=256).windows == (64,)


def test_rows_are_shorter_for_the_hankel_rank_alone_and_never_longer_than_the_model_reads():
    smol, short = LlamaConfig(), LlamaConfig(max_position_embeddings=512)
    context = lambda config, **settings: make_options(config, "m", **settings).context
    assert (context(smol), context(smol, methods=["hankel", "swa"]), context(smol, context=64)) == (1024, 2048, 64)
    assert (context(short), context(short, methods=["swa"])) == (512, 512)


def test_retrieval_items_are_never_too_short_for_a_question():
    smol = LlamaConfig(hidden_size=576, num_attention_heads=9, num_key_value_heads=3)
    lengths = lambda context: make_options(smol, "m", context=context).lengths
    assert lengths(2048) == (512, 1024, 2048)
    assert (lengths(256), lengths(300), lengths(64)) == ((128, 256), (128, 150, 300), (64,))
