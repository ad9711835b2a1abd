"""A request's way: which app it is for, which machine takes it, here or in another region."""
