"""The verbs by what they are about; `Step` has all of them."""
