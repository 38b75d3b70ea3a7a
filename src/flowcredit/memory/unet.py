"""UNet2DConditionModel of Stable Diffusion 1 and 2, written for the dry run in the order of diffusers' code.

Axes: B rows, C channels, h and w height and width, T pixels of a level, L text tokens, E width of the text.
"""

from flowcredit.memory.convolutions import group_norm, resnet
from flowcredit.memory.tape import Tape, Value
from flowcredit.memory.transformers import Config, embed_mlp

DOWN = ("CrossAttnDownBlock2D", "DownBlock2D")
UP = ("CrossAttnUpBlock2D", "UpBlock2D")


def is_plain_unet(config: Config) -> bool:
    """Whether a config is of the kind that Stable Diffusion 1 and 2 have, which alone is written here."""
    return (
        all(kind in DOWN for kind in config["down_block_types"])
        and all(kind in UP for kind in config["up_block_types"])
        and isinstance(config["layers_per_block"], int)
        and isinstance(config["cross_attention_dim"], int)
        and config.get("transformer_layers_per_block", 1) == 1
        and not config.get("class_embed_type")
        and not config.get("addition_embed_type")
    )


def unet(tape: Tape, config: Config, x: Value, text: Value, pooled: Value) -> Value:
    """x [B, C, h, w], text [B, L, E]; ``pooled`` is not read."""
    return _UNet(tape, config, text).run(x)


class _UNet:
    def __init__(self, tape: Tape, config: Config, text: Value) -> None:
        self.tape, self.config, self.text = tape, config, text
        self.widths: list[int] = list(config["block_out_channels"])
        self.groups: int = config.get("norm_num_groups", 32)
        self.layers: int = config["layers_per_block"]
        heads = config.get("attention_head_dim", 8)
        self.heads = [heads] * len(self.widths) if isinstance(heads, int) else list(heads)

    def run(self, x: Value) -> Value:
        tape, config, widths = self.tape, self.config, self.widths
        time = tape.new((x.shape[0], widths[0]), tape.stored)
        emb = embed_mlp(tape, "time_embedding", time, 4 * widths[0])
        x = tape.conv(x, "conv_in", widths[0])
        kept = [x]
        for level, kind in enumerate(config["down_block_types"]):
            name, attends = f"down_blocks.{level}", kind == DOWN[0]
            for number in range(self.layers):
                x = self._resnet(f"{name}.resnets.{number}", x, widths[level], emb)
                if attends:
                    x = self._attention(f"{name}.attentions.{number}", x, self.heads[level])
                kept.append(x)
            if level < len(widths) - 1:
                x = tape.conv(x, f"{name}.downsamplers.0.conv", widths[level], stride=2)
                kept.append(x)
        x = self._resnet("mid_block.resnets.0", x, widths[-1], emb, always=True)
        x = self._attention("mid_block.attentions.0", x, self.heads[-1])
        x = self._resnet("mid_block.resnets.1", x, widths[-1], emb)
        for level, kind in enumerate(config["up_block_types"]):
            name, attends = f"up_blocks.{level}", kind == UP[0]
            width = widths[-1 - level]
            # The caller holds a block's input and what it joins until the block is done.
            given, joined = x, kept[-self.layers - 1 :]
            kept = kept[: -self.layers - 1]
            for number in range(self.layers + 1):
                x = tape.join([x, joined[-1 - number]], 1)
                x = self._resnet(f"{name}.resnets.{number}", x, width, emb)
                if attends:
                    x = self._attention(f"{name}.attentions.{number}", x, self.heads[-1 - level])
            if level < len(widths) - 1:
                x = tape.conv(tape.larger_image(x), f"{name}.upsamplers.0.conv", width)
        del given, joined
        x = tape.activation(group_norm(tape, x, "conv_norm_out", self.groups))
        return tape.conv(x, "conv_out", config["out_channels"])

    def _resnet(self, name: str, x: Value, width: int, emb: Value, always: bool = False) -> Value:
        """Computed anew under checkpoints, but for the first of the middle (``always`` kept)."""
        if always:
            return resnet(self.tape, name, x, width, self.groups, emb)

        def run(given: Value, time: Value) -> tuple[Value, ...]:
            return (resnet(self.tape, name, given, width, self.groups, time),)

        return self.tape.block(run, x, emb)[0]

    def _attention(self, name: str, x: Value, heads: int) -> Value:
        """Transformer2DModel of one block."""
        tape, residual = self.tape, x
        rows, width, height, across = x.shape
        linear, tokens = self.config.get("use_linear_projection", False), height * across
        x = group_norm(tape, x, f"{name}.norm", self.groups)
        if linear:
            x = tape.linear(tape.copy(x, (rows, tokens, width)), f"{name}.proj_in", width)
        else:
            x = tape.copy(tape.conv(x, f"{name}.proj_in", width, kernel=1), (rows, tokens, width))

        def run(given: Value) -> tuple[Value, ...]:
            return (self._block(f"{name}.transformer_blocks.0", given, heads),)

        (x,) = tape.block(run, x)
        if linear:
            x = tape.copy(tape.linear(x, f"{name}.proj_out", width), residual.shape)
        else:
            x = tape.conv(tape.copy(x, residual.shape), f"{name}.proj_out", width, kernel=1)
        return tape.add(x, residual)

    def _block(self, name: str, x: Value, heads: int) -> Value:
        """BasicTransformerBlock: to itself, to the text, and a gated feed-forward layer."""
        normed = self._norm(f"{name}.norm1", x)
        x = self.tape.add(self._attend(f"{name}.attn1", normed, normed, heads), x)
        normed = self._norm(f"{name}.norm2", x)
        x = self.tape.add(self._attend(f"{name}.attn2", normed, self.text, heads), x)
        normed = self._norm(f"{name}.norm3", x)
        out = self._feed_forward(f"{name}.ff", normed)
        return self.tape.add(out, x)

    def _norm(self, name: str, x: Value) -> Value:
        return self.tape.norm(x, name, x.shape[-1], x.count // x.shape[-1])

    def _attend(self, name: str, x: Value, to: Value, heads: int) -> Value:
        tape, width = self.tape, x.shape[-1]
        q = tape.linear(x, f"{name}.to_q", width, bias=False)
        k = tape.linear(to, f"{name}.to_k", width, bias=False)
        v = tape.linear(to, f"{name}.to_v", width, bias=False)
        q, k, v = (tape.view(each, (*each.shape[:2], heads, width // heads)) for each in (q, k, v))
        out = tape.cast(tape.attention(q, k, v), q.width)
        return tape.linear(tape.view(out, x.shape), f"{name}.to_out.0", width)

    def _feed_forward(self, name: str, x: Value) -> Value:
        tape, width = self.tape, x.shape[-1]
        both = tape.linear(x, f"{name}.net.0.proj", 8 * width)
        half = (*x.shape[:-1], 4 * width)
        hidden, gate = tape.part(both, half), tape.part(both, half)
        hidden = tape.times(hidden, tape.activation(gate))
        del both, gate
        return tape.linear(hidden, f"{name}.net.2", width)
