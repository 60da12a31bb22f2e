//! A short hash of a pod template, for names and labels.

use mayfly_api::{Digest, k8s::api::core::v1::PodTemplateSpec};
use serde::Serialize;

/// Letters and digits that form no words. Upstream's alphabet (`apimachinery/pkg/util/rand`).
const SAFE: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";

/// A hash of the template; another one for each collision that was counted.
pub(crate) fn template_hash(template: &PodTemplateSpec, collisions: Option<i32>) -> String {
    short_hash(&(template, collisions.filter(|count| *count > 0)))
}

/// A hash of a value's JSON text: as long and from the same alphabet as upstream's. The number itself differs from
/// upstream's, which hashes the memory layout of Go's structs.
pub(crate) fn short_hash(value: &impl Serialize) -> String {
    let text = serde_json::to_vec(value).unwrap_or_default();
    let digest = Digest::of(&text).to_string();
    let hex = digest.trim_start_matches("sha256:").get(..8).unwrap_or_default();
    safe_encoded(u32::from_str_radix(hex, 16).unwrap_or_default())
}

/// A number in letters and digits that form no words.
pub(crate) fn safe_encoded(number: u32) -> String {
    number.to_string().bytes().map(|digit| char::from(SAFE[usize::from(digit) % SAFE.len()])).collect()
}
