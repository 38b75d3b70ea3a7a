"""AutoencoderKL's decoder and encoder, written for the dry run in the order of diffusers' own code.

Axes: B rows, C channels, h and w height and width.
"""

from flowcredit.memory.tape import Tape, Value
from flowcredit.memory.transformers import Config, per_head, whole


def decoder(tape: Tape, config: Config, latents: Value) -> Value:
    """[B, C, h, w] latents to [B, 3, H, W]."""
    widths, groups = config["block_out_channels"], config["norm_num_groups"]
    if config.get("use_post_quant_conv", True):
        latents = tape.conv(latents, "post_quant_conv", latents.shape[1], kernel=1)
    x = tape.conv(latents, "decoder.conv_in", widths[-1])
    x = _middle(tape, "decoder.mid_block", x, groups, config.get("mid_block_add_attention", True))
    for level, width in enumerate(reversed(widths)):
        name = f"decoder.up_blocks.{level}"
        for number in range(config["layers_per_block"] + 1):
            x = resnet(tape, f"{name}.resnets.{number}", x, width, groups)
        if level < len(widths) - 1:
            x = tape.larger_image(x)
            x = tape.conv(x, f"{name}.upsamplers.0.conv", width)
    x = group_norm(tape, x, "decoder.conv_norm_out", groups)
    x = tape.activation(x)
    return tape.conv(x, "decoder.conv_out", config["out_channels"])


def encoder(tape: Tape, config: Config, image: Value) -> Value:
    """Run for its parameters alone."""
    widths, groups = config["block_out_channels"], config["norm_num_groups"]
    x = tape.conv(image, "encoder.conv_in", widths[0])
    for level, width in enumerate(widths):
        name = f"encoder.down_blocks.{level}"
        for number in range(config["layers_per_block"]):
            x = resnet(tape, f"{name}.resnets.{number}", x, width, groups)
        if level < len(widths) - 1:
            x = tape.conv(x, f"{name}.downsamplers.0.conv", width, stride=2)
    x = _middle(tape, "encoder.mid_block", x, groups, config.get("mid_block_add_attention", True))
    x = tape.activation(group_norm(tape, x, "encoder.conv_norm_out", groups))
    x = tape.conv(x, "encoder.conv_out", 2 * config["latent_channels"])
    if config.get("use_quant_conv", True):
        x = tape.conv(x, "quant_conv", x.shape[1], kernel=1)
    return x


def group_norm(tape: Tape, x: Value, name: str, groups: int) -> Value:
    return tape.norm(x, name, x.shape[1], x.shape[0] * groups)


def resnet(tape: Tape, name: str, x: Value, width: int, groups: int, emb: Value | None = None) -> Value:
    """ResnetBlock2D; ``emb`` [B, E] the time's embedding."""
    hidden = group_norm(tape, x, f"{name}.norm1", groups)
    hidden = tape.activation(hidden)
    hidden = tape.conv(hidden, f"{name}.conv1", width)
    if emb is not None:
        time = tape.linear(tape.activation(emb), f"{name}.time_emb_proj", width)
        hidden = tape.add(hidden, tape.view(time, (x.shape[0], width, 1, 1)))
    hidden = group_norm(tape, hidden, f"{name}.norm2", groups)
    hidden = tape.activation(hidden)
    hidden = tape.conv(hidden, f"{name}.conv2", width)
    if x.shape[1] != width:
        x = tape.conv(x, f"{name}.conv_shortcut", width, kernel=1)
    total = tape.add(x, hidden)
    # Divided by output_scale_factor, also where that is 1.
    return tape.copy(total)


def _middle(tape: Tape, name: str, x: Value, groups: int, attends: bool) -> Value:
    x = resnet(tape, f"{name}.resnets.0", x, x.shape[1], groups)
    if attends:
        x = _attention(tape, f"{name}.attentions.0", x, groups)
    return resnet(tape, f"{name}.resnets.1", x, x.shape[1], groups)


def _attention(tape: Tape, name: str, x: Value, groups: int) -> Value:
    """One head over all pixels."""
    rows, width, height, across = x.shape
    hidden = tape.view(x, (rows, height * across, width))
    hidden = tape.norm(hidden, f"{name}.group_norm", width, rows * groups)
    q, k, v = (
        per_head(tape, tape.linear(hidden, f"{name}.{w}", width), width) for w in ("to_q", "to_k", "to_v")
    )
    out = tape.linear(whole(tape, tape.attention(q, k, v)), f"{name}.to_out.0", width)
    out = tape.view(tape.copy(out), x.shape)
    out = tape.add(out, x)
    return tape.copy(out)
