"""Images to learn from: where they are found, how they are fetched and checked."""

from gradmem.data.cifar import Cifar100, load_cifar100
from gradmem.data.errors import DataError
from gradmem.data.images import Images
from gradmem.data.mnist import load_mnist

__all__ = ["Cifar100", "DataError", "Images", "load_cifar100", "load_mnist"]
