"""InternVL3 and InternVL3.5, in transformers' form and in the releases' own."""

from saccade.models.family import Family

FAMILY = Family(
    architectures=("InternVLForConditionalGeneration", "InternVLChatModel"),
    model_types=("internvl", "internvl_chat"),
    placeholder="<IMG_CONTEXT>",
    # The placeholder of images also stands for the frames of videos.
    video_placeholder="<IMG_CONTEXT>",
    text_end="<|endoftext|>",
    plain_positions=True,
    # OpenGVLab/InternVL, internvl_chat/eval/refcoco/evaluate_grounding.py.
    box_coordinates="thousandths",
    limits=("Text networks other than Qwen2 and Qwen3, such as GPT-OSS, are refused by the engine.",),
)
