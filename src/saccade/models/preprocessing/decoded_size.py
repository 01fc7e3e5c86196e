"""An image has the size of its header, for which its tokens were counted. No torch."""

from saccade.errors import InternalError


def check_decoded(own: object, counted: object) -> None:
    """Raise InternalError if *own*, the layout of the decoded image or a part of it, is not the *counted* one."""
    if own != counted:
        raise InternalError("The image's decoded size differs from the size for which its tokens were counted.")
