//! The component that the image of a wasm container names.

use crate::{Digest, wellknown::COMPONENT_IMAGE_PREFIX};

/// The component that a wasm container's image names: the digest alone (`sha256:…`), or in the form of an image's
/// reference ([`COMPONENT_IMAGE_PREFIX`] and the digits). `None` if the image names no component.
pub fn component_of_image(image: &str) -> Option<Digest> {
    match image.strip_prefix(COMPONENT_IMAGE_PREFIX) {
        Some(hex) => format!("sha256:{hex}").parse().ok(),
        None => image.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_may_name_a_component() {
        let digest = Digest::of(b"hello");
        assert_eq!(component_of_image(&digest.to_string()), Some(digest));
        assert_eq!(component_of_image(&format!("{COMPONENT_IMAGE_PREFIX}{}", digest.hex())), Some(digest));
        for bad in ["busybox", "", COMPONENT_IMAGE_PREFIX, &format!("busybox@{digest}")] {
            assert_eq!(component_of_image(bad), None, "{bad}");
        }
    }
}
