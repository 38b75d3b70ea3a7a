"""The transformers of FLUX.1 and SD3, written for the dry run in the order of diffusers' own code.

Each function takes what its config.json says, runs one evaluation over a tape and returns the velocity. Local
names live as long as they do in diffusers, because that is how long their memory is taken.

Axes: B rows, S image tokens, L text tokens, D width of the network, E width of the text.
"""

from collections.abc import Mapping
from typing import Any

from flowcredit.memory.tape import Tape, Value

Config = Mapping[str, Any]


def embed_mlp(tape: Tape, name: str, x: Value, width: int) -> Value:
    hidden = tape.activation(tape.linear(x, f"{name}.linear_1", width))
    return tape.linear(hidden, f"{name}.linear_2", width)


def modulation(tape: Tape, name: str, emb: Value, parts: int, width: int) -> list[Value]:
    """[B, D] to ``parts`` shifts, scales and gates of [B, 1, D]."""
    rows = emb.shape[0]
    whole = tape.linear(tape.activation(emb), f"{name}.linear", parts * width)
    return [tape.part(whole, (rows, 1, width)) for _ in range(parts)]


def modulated(tape: Tape, x: Value, scale: Value, shift: Value) -> Value:
    """A norm without weights, scaled and shifted."""
    return scaled(tape, plain_norm(tape, x), scale, shift)


def plain_norm(tape: Tape, x: Value) -> Value:
    return tape.norm(x, None, x.shape[-1], x.count // x.shape[-1])


def scaled(tape: Tape, x: Value, scale: Value, shift: Value) -> Value:
    return tape.add(tape.times(x, tape.copy(scale)), shift)


def feed_forward(tape: Tape, name: str, x: Value, width: int) -> Value:
    hidden = tape.linear(x, f"{name}.net.0.proj", 4 * width)
    hidden = tape.activation(hidden)
    return tape.linear(hidden, f"{name}.net.2", width)


def per_head(tape: Tape, x: Value, head: int) -> Value:
    return tape.view(x, (*x.shape[:-1], x.shape[-1] // head, head))


def whole(tape: Tape, x: Value) -> Value:
    return tape.view(x, (*x.shape[:-2], x.shape[-2] * x.shape[-1]))


def split_tokens(tape: Tape, x: Value, first: int, copied: bool) -> tuple[Value, Value]:
    """Tokens before and after ``first``; ``copied`` where a layer needs them in one piece."""
    rows, tokens, width = x.shape
    parts = tape.part(x, (rows, first, width)), tape.part(x, (rows, tokens - first, width))
    if copied and rows > 1:
        return tape.copy(parts[0]), tape.copy(parts[1])
    return parts


def flux(tape: Tape, config: Config, x: Value, text: Value, pooled: Value) -> Value:
    """FluxTransformer2DModel: x [B, S, C], text [B, L, E], pooled [B, P]."""
    head = config["attention_head_dim"]
    width, rows = config["num_attention_heads"] * head, x.shape[0]
    hidden = tape.linear(x, "x_embedder", width)
    name = "time_text_embed"
    emb = embed_mlp(tape, f"{name}.timestep_embedder", tape.new((rows, 256), tape.stored), width)
    if config.get("guidance_embeds"):
        guidance = embed_mlp(tape, f"{name}.guidance_embedder", tape.new((rows, 256), tape.stored), width)
        emb = tape.add(emb, guidance)
    emb = tape.add(emb, embed_mlp(tape, f"{name}.text_embedder", pooled, width))
    context = tape.linear(text, "context_embedder", width)
    tables = tape.new((2, text.shape[1] + x.shape[1], head), 4)
    for number in range(config["num_layers"]):
        name = f"transformer_blocks.{number}"

        def double(h: Value, c: Value, e: Value, name: str = name) -> tuple[Value, ...]:
            return _flux_double(tape, name, h, c, e, head)

        context, hidden = tape.block(double, hidden, context, emb)
    for number in range(config["num_single_layers"]):
        name = f"single_transformer_blocks.{number}"

        def single(h: Value, c: Value, e: Value, name: str = name) -> tuple[Value, ...]:
            return _flux_single(tape, name, h, c, e, head)

        context, hidden = tape.block(single, hidden, context, emb)
    del tables
    scale, shift = modulation(tape, "norm_out", emb, 2, width)
    hidden = modulated(tape, hidden, scale, shift)
    return tape.linear(hidden, "proj_out", config.get("out_channels") or config["in_channels"])


def _flux_qkv(tape: Tape, name: str, x: Value, head: int, words: tuple[str, ...]) -> list[Value]:
    """Projections of [B, T, D], per head, the first two normed; ``words`` name layers and norms."""
    q, k, v = (per_head(tape, tape.linear(x, f"{name}.{w}", x.shape[-1]), head) for w in words[:3])
    return [tape.rms_norm(q, f"{name}.{words[3]}"), tape.rms_norm(k, f"{name}.{words[4]}"), v]


IMAGE = ("to_q", "to_k", "to_v", "norm_q", "norm_k")
TEXT = ("add_q_proj", "add_k_proj", "add_v_proj", "norm_added_q", "norm_added_k")


def _flux_double(tape: Tape, name: str, h: Value, c: Value, emb: Value, head: int) -> tuple[Value, ...]:
    width = h.shape[-1]
    shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = modulation(tape, f"{name}.norm1", emb, 6, width)
    normed = modulated(tape, h, scale, shift)
    c_shift, c_scale, c_gate, c_shift_mlp, c_scale_mlp, c_gate_mlp = modulation(
        tape, f"{name}.norm1_context", emb, 6, width
    )
    c_normed = modulated(tape, c, c_scale, c_shift)
    out, c_out = _flux_attention(tape, f"{name}.attn", normed, c_normed, head)
    out = tape.times(out, gate)
    h = tape.add(h, out)
    normed = modulated(tape, h, scale_mlp, shift_mlp)
    ff = feed_forward(tape, f"{name}.ff", normed, width)
    ff = tape.times(ff, gate_mlp)
    h = tape.add(h, ff)
    c_out = tape.times(c_out, c_gate)
    c = tape.add(c, c_out)
    c_normed = modulated(tape, c, c_scale_mlp, c_shift_mlp)
    c_ff = feed_forward(tape, f"{name}.ff_context", c_normed, width)
    c = tape.add(c, tape.times(c_ff, c_gate_mlp))
    return c, h


def _flux_attention(tape: Tape, name: str, x: Value, c: Value, head: int) -> tuple[Value, Value]:
    width = x.shape[-1]
    q, k, v = _flux_qkv(tape, name, x, head, IMAGE)
    c_q, c_k, c_v = _flux_qkv(tape, name, c, head, TEXT)
    q = tape.join([c_q, q], 1)
    k = tape.join([c_k, k], 1)
    v = tape.join([c_v, v], 1)
    q = tape.rotary(q)
    k = tape.rotary(k)
    out = tape.cast(whole(tape, tape.attention(q, k, v)), q.width)
    c_out, out = split_tokens(tape, out, c.shape[1], copied=True)
    return tape.linear(out, f"{name}.to_out.0", width), tape.linear(c_out, f"{name}.to_add_out", width)


def _flux_single(tape: Tape, name: str, h: Value, c: Value, emb: Value, head: int) -> tuple[Value, ...]:
    width, texts = h.shape[-1], c.shape[1]
    h = tape.join([c, h], 1)
    residual = h
    shift, scale, gate = modulation(tape, f"{name}.norm", emb, 3, width)
    normed = modulated(tape, h, scale, shift)
    mlp = tape.activation(tape.linear(normed, f"{name}.proj_mlp", 4 * width))
    attended = _flux_alone(tape, f"{name}.attn", normed, head)
    h = tape.join([attended, mlp], 2)
    h = tape.times(tape.linear(h, f"{name}.proj_out", width), gate)
    h = tape.add(residual, h)
    return split_tokens(tape, h, texts, copied=False)


def _flux_alone(tape: Tape, name: str, x: Value, head: int) -> Value:
    q, k, v = _flux_qkv(tape, name, x, head, IMAGE)
    q = tape.rotary(q)
    k = tape.rotary(k)
    return tape.cast(whole(tape, tape.attention(q, k, v)), q.width)


def sd3(tape: Tape, config: Config, x: Value, text: Value, pooled: Value) -> Value:
    """SD3Transformer2DModel: x [B, C, h, w], text [B, L, E], pooled [B, P]."""
    head, patch = config["attention_head_dim"], config["patch_size"]
    width, rows = config["num_attention_heads"] * head, x.shape[0]
    hidden = tape.conv(x, "pos_embed.proj", width, kernel=patch, stride=patch, padded=False)
    tokens = hidden.shape[2] * hidden.shape[3]
    hidden = tape.view(hidden, (rows, tokens, width))
    positions = tape.new((1, tokens, width), tape.stored)
    hidden = tape.copy(tape.cast(tape.add(hidden, positions), hidden.width))
    name = "time_text_embed"
    emb = embed_mlp(tape, f"{name}.timestep_embedder", tape.new((rows, 256), tape.stored), width)
    emb = tape.add(emb, embed_mlp(tape, f"{name}.text_embedder", pooled, width))
    context = tape.linear(text, "context_embedder", config["caption_projection_dim"])
    del positions
    for number in range(config["num_layers"]):
        block = _SD3Block(
            f"transformer_blocks.{number}",
            head,
            last=number == config["num_layers"] - 1,
            dual=number in tuple(config.get("dual_attention_layers") or ()),
            normed=config.get("qk_norm") is not None,
        )

        def run(h: Value, c: Value, e: Value, block: "_SD3Block" = block) -> tuple[Value, ...]:
            return block.run(tape, h, c, e)

        outs = tape.block(run, hidden, context, emb)
        hidden, context = outs[0], outs[-1]
    scale, shift = modulation(tape, "norm_out", emb, 2, width)
    hidden = modulated(tape, hidden, scale, shift)
    out = tape.linear(
        hidden, "proj_out", patch * patch * (config.get("out_channels") or config["in_channels"])
    )
    return tape.copy(out)


class _SD3Block:
    """JointTransformerBlock: ``last`` needs no text after it, ``dual`` attends a second time to the image."""

    def __init__(self, name: str, head: int, *, last: bool, dual: bool, normed: bool) -> None:
        self.name, self.head, self.last, self.dual, self.normed = name, head, last, dual, normed

    def run(self, tape: Tape, h: Value, c: Value, emb: Value) -> tuple[Value, ...]:
        name, width = self.name, h.shape[-1]
        mods = modulation(tape, f"{name}.norm1", emb, 9 if self.dual else 6, width)
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = mods[:6]
        plain = plain_norm(tape, h)
        normed = scaled(tape, plain, scale, shift)
        again = scaled(tape, plain, mods[7], mods[6]) if self.dual else None
        del plain
        c_mods = modulation(tape, f"{name}.norm1_context", emb, 2 if self.last else 6, width)
        c_normed = modulated(tape, c, c_mods[1], c_mods[0])
        out, c_out = self._attention(tape, f"{name}.attn", normed, c_normed)
        out = tape.times(out, gate)
        h = tape.add(h, out)
        if again is not None:
            second, _ = self._attention(tape, f"{name}.attn2", again, None)
            h = tape.add(h, tape.times(second, mods[8]))
        normed = modulated(tape, h, scale_mlp, shift_mlp)
        ff = feed_forward(tape, f"{name}.ff", normed, width)
        ff = tape.times(ff, gate_mlp)
        h = tape.add(h, ff)
        if self.last:
            return (h,)
        c = tape.add(c, tape.times(c_out, c_mods[2]))
        c_normed = modulated(tape, c, c_mods[4], c_mods[3])
        c_ff = feed_forward(tape, f"{name}.ff_context", c_normed, width)
        c = tape.add(c, tape.times(c_ff, c_mods[5]))
        return h, c

    def _project(self, tape: Tape, name: str, x: Value, words: tuple[str, ...]) -> list[Value]:
        q, k, v = (per_head(tape, tape.linear(x, f"{name}.{w}", x.shape[-1]), self.head) for w in words[:3])
        if self.normed:
            q, k = tape.slow_rms_norm(q, f"{name}.{words[3]}"), tape.slow_rms_norm(k, f"{name}.{words[4]}")
        return [q, k, v]

    def _attention(self, tape: Tape, name: str, x: Value, c: Value | None) -> tuple[Value, Value]:
        width = x.shape[-1]
        q, k, v = self._project(tape, name, x, IMAGE)
        if c is not None:
            c_q, c_k, c_v = self._project(tape, name, c, TEXT)
            q = tape.join([q, c_q], 1)
            k = tape.join([k, c_k], 1)
            v = tape.join([v, c_v], 1)
        out = tape.cast(whole(tape, tape.attention(q, k, v)), q.width)
        c_out = out
        if c is not None:
            out, c_out = split_tokens(tape, out, x.shape[1], copied=True)
            if not self.last:
                c_out = tape.linear(c_out, f"{name}.to_add_out", width)
        return tape.linear(out, f"{name}.to_out.0", width), c_out
