"""Made-up labelled images for the convolutional models: noise with random labels.

Planning and timing depend on shapes alone, and a fixed batch of noise can still be learned by heart, which is what
the tests ask of it. The arrays are drawn by jax, not numpy, so that a batch of 1,024 images of 224 x 224 costs no
memory while ``make`` is only evaluated abstractly.
"""

import jax
import jax.numpy as jnp


def example_batch(key: jax.Array, *, batch: int, image: int, channels: int, classes: int) -> dict[str, jax.Array]:
    """``{"image": f32[batch, image, image, channels], "label": i32[batch]}``."""
    image_key, label_key = jax.random.split(key)
    return {
        "image": jax.random.normal(image_key, (batch, image, image, channels), jnp.float32),
        "label": jax.random.randint(label_key, (batch,), 0, classes, jnp.int32),
    }
