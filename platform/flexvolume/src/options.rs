//! The options of a driver's calls: one JSON object.

use std::collections::BTreeMap;

use base64::{Engine as _, prelude::BASE64_STANDARD};

/// The prefix of the options that the caller sets; the others are the user's.
const RESERVED: &str = "kubernetes.io/";

/// The options of one call. The JSON object contains these texts, with the user's options merged last.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CallOptions(BTreeMap<String, String>);

impl CallOptions {
    /// The options of all calls. `name`: of the PersistentVolume, otherwise of the pod's volume.
    pub fn new(fs_type: &str, read_only: bool, name: &str) -> Self {
        let mut options = Self::default();
        options.set("fsType", fs_type);
        options.set("readwrite", if read_only { "ro" } else { "rw" });
        options.set("pvOrVolumeName", name);
        options
    }

    /// Sets `kubernetes.io/<name>`.
    pub fn set(&mut self, name: &str, value: impl Into<String>) {
        self.0.insert(format!("{RESERVED}{name}"), value.into());
    }

    /// Sets the value of a Secret's key, which drivers get in base64.
    pub fn set_secret(&mut self, key: &str, value: &[u8]) {
        self.set(&format!("secret/{key}"), BASE64_STANDARD.encode(value));
    }

    /// Merges the user's options.
    pub fn extend(&mut self, options: impl IntoIterator<Item = (String, String)>) {
        self.0.extend(options);
    }

    /// Whether a user's option has a name that is reserved for the caller.
    pub fn is_reserved(name: &str) -> bool {
        name.starts_with(RESERVED)
    }

    /// The argument of a call.
    pub fn json(&self) -> String {
        serde_json::json!(self.0).to_string()
    }
}
