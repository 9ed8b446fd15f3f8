"""Images in questions: decoded in processes of their own, and brought into one form. Rule: nothing else of tailrace
decodes what a client sent; what leaves this package are pixels, as a PNG without anything beside them."""
