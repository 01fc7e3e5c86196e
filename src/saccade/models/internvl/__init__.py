"""InternVL3 and InternVL3.5, in the form of transformers and in the release's own."""

from saccade.models.family import Family

FAMILY = Family(
    architectures=("InternVLForConditionalGeneration", "InternVLChatModel"),
    model_types=("internvl", "internvl_chat"),
    placeholder="<IMG_CONTEXT>",
    # Frames of videos are filled by the placeholder of images.
    video_placeholder="<IMG_CONTEXT>",
    text_end="<|endoftext|>",
    plain_positions=True,
    limits=("Text networks other than Qwen2 and Qwen3, such as GPT-OSS, are refused by the engine.",),
)
