"""The private parts of retrograd.bnns that tests look into: no other test or helper imports them."""

from retrograd.bnns import _graph_operations as graph_operations
from retrograd.bnns import _nearest_neighbors as nearest_neighbors
from retrograd.bnns import _products as products
from retrograd.bnns._failure import UNEXPECTED, Invalid, advise_once, first_failure
from retrograd.bnns._structures import Address, Extents, Structure

__all__ = [
    "UNEXPECTED",
    "Address",
    "Extents",
    "Invalid",
    "Structure",
    "advise_once",
    "first_failure",
    "graph_operations",
    "nearest_neighbors",
    "products",
]
