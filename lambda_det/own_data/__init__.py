"""Own images and labels: formats, parts, held-out images, and the recipe that fits them."""
