"""Images to learn from: where they are found, how they are fetched and checked."""

from gradmem.data.idx import DataError
from gradmem.data.images import Images
from gradmem.data.mnist import load_mnist

__all__ = ["DataError", "Images", "load_mnist"]
