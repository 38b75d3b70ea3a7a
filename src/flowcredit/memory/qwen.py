"""QwenImageTransformer2DModel, written for the dry run in the order of diffusers' own code.

Axes: B rows, S image tokens, L text tokens, D width of the network, E width of the text.
"""

from flowcredit.memory.tape import Tape, Value
from flowcredit.memory.transformers import (
    IMAGE,
    TEXT,
    Config,
    embed_mlp,
    feed_forward,
    modulated,
    modulation,
    per_head,
    plain_norm,
    scaled,
    split_tokens,
    whole,
)


def qwen_image(tape: Tape, config: Config, x: Value, text: Value, pooled: Value) -> Value:
    """x [B, S, C], text [B, L, E]; ``pooled`` is not read."""
    head = config["attention_head_dim"]
    width, rows = config["num_attention_heads"] * head, x.shape[0]
    hidden = tape.linear(x, "img_in", width)
    context = tape.linear(tape.slow_rms_norm(text, "txt_norm"), "txt_in", width)
    time = tape.new((rows, 256), hidden.width)
    emb = embed_mlp(tape, "time_text_embed.timestep_embedder", time, width)
    for number in range(config["num_layers"]):
        name = f"transformer_blocks.{number}"

        def block(h: Value, c: Value, e: Value, name: str = name) -> tuple[Value, ...]:
            return _block(tape, name, h, c, e, head)

        context, hidden = tape.block(block, hidden, context, emb)
    scale, shift = modulation(tape, "norm_out", emb, 2, width)
    hidden = modulated(tape, hidden, scale, shift)
    patch = config["patch_size"]
    channels = config.get("out_channels") or config["in_channels"]
    return tape.linear(hidden, "proj_out", patch * patch * channels)


def _modulations(tape: Tape, name: str, emb: Value, width: int) -> list[Value]:
    rows = emb.shape[0]
    both = tape.linear(tape.activation(emb), f"{name}.1", 6 * width)
    halves = [tape.part(both, (rows, 3 * width)) for _ in range(2)]
    return [tape.part(half, (rows, 1, width)) for half in halves for _ in range(3)]


def _block(tape: Tape, name: str, h: Value, c: Value, emb: Value, head: int) -> tuple[Value, ...]:
    width = h.shape[-1]
    shift, scale, gate, shift_2, scale_2, gate_2 = _modulations(tape, f"{name}.img_mod", emb, width)
    c_shift, c_scale, c_gate, c_shift_2, c_scale_2, c_gate_2 = _modulations(
        tape, f"{name}.txt_mod", emb, width
    )
    normed = plain_norm(tape, h)
    x = scaled(tape, normed, scale, shift)
    c_normed = plain_norm(tape, c)
    c_x = scaled(tape, c_normed, c_scale, c_shift)
    out, c_out = _attention(tape, f"{name}.attn", x, c_x, head)
    h = tape.add(h, tape.times(out, gate))
    c = tape.add(c, tape.times(c_out, c_gate))
    normed_2 = plain_norm(tape, h)
    x_2 = scaled(tape, normed_2, scale_2, shift_2)
    mlp = feed_forward(tape, f"{name}.img_mlp", x_2, width)
    h = tape.add(h, tape.times(mlp, gate_2))
    c_normed_2 = plain_norm(tape, c)
    c_x_2 = scaled(tape, c_normed_2, c_scale_2, c_shift_2)
    c_mlp = feed_forward(tape, f"{name}.txt_mlp", c_x_2, width)
    c = tape.add(c, tape.times(c_mlp, c_gate_2))
    return c, h


def _attention(tape: Tape, name: str, x: Value, c: Value, head: int) -> tuple[Value, Value]:
    width = x.shape[-1]
    q, k, v = (per_head(tape, tape.linear(x, f"{name}.{w}", width), head) for w in IMAGE[:3])
    c_q, c_k, c_v = (per_head(tape, tape.linear(c, f"{name}.{w}", width), head) for w in TEXT[:3])
    q = tape.slow_rms_norm(q, f"{name}.{IMAGE[3]}")
    k = tape.slow_rms_norm(k, f"{name}.{IMAGE[4]}")
    c_q = tape.slow_rms_norm(c_q, f"{name}.{TEXT[3]}")
    c_k = tape.slow_rms_norm(c_k, f"{name}.{TEXT[4]}")
    q, k = tape.complex_rotary(q), tape.complex_rotary(k)
    c_q, c_k = tape.complex_rotary(c_q), tape.complex_rotary(c_k)
    joint_q = tape.join([c_q, q], 1)
    joint_k = tape.join([c_k, k], 1)
    joint_v = tape.join([c_v, v], 1)
    out = tape.cast(whole(tape, tape.attention(joint_q, joint_k, joint_v)), joint_q.width)
    c_out, out = split_tokens(tape, out, c.shape[1], copied=True)
    return tape.linear(out, f"{name}.to_out.0", width), tape.linear(c_out, f"{name}.to_add_out", width)
