//! Names of objects, as Kubernetes defines them.

use std::fmt;

/// Longest DNS label, in bytes (RFC 1123).
pub const LABEL_BYTES_MAX: usize = 63;
/// Longest DNS subdomain, in bytes (RFC 1123).
pub const SUBDOMAIN_BYTES_MAX: usize = 253;

/// Namespace and name of a namespaced object: the key in caches and work queues.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectKey {
    /// Empty for a cluster-scoped object.
    pub namespace: String,
    pub name: String,
}

impl ObjectKey {
    pub fn new(namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }

    /// A cluster-scoped object's key.
    pub fn cluster(name: impl Into<String>) -> Self {
        Self { namespace: String::new(), name: name.into() }
    }

    /// The key in an object's metadata.
    pub fn of<K: kube::Resource>(object: &K) -> Self {
        let meta = object.meta();
        Self {
            namespace: meta.namespace.clone().unwrap_or_default(),
            name: meta.name.clone().unwrap_or_default(),
        }
    }
}

impl fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.namespace.is_empty() {
            f.write_str(&self.name)
        } else {
            write!(f, "{}/{}", self.namespace, self.name)
        }
    }
}

/// Checks an RFC 1123 label (namespaces, functions: their name becomes a host label).
///
/// The wording is upstream's (`apimachinery/pkg/util/validation`), so that people can search for it.
pub fn dns_label(name: &str) -> Result<(), String> {
    if name.len() > LABEL_BYTES_MAX {
        return Err(format!("must be no more than {LABEL_BYTES_MAX} bytes"));
    }
    if is_label(name) {
        return Ok(());
    }
    Err("a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must \
         start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for \
         validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')"
        .into())
}

/// Checks an RFC 1035 label (Services: their name becomes a host label that begins with a letter).
pub fn dns_1035_label(name: &str) -> Result<(), String> {
    if name.len() > LABEL_BYTES_MAX {
        return Err(format!("must be no more than {LABEL_BYTES_MAX} characters"));
    }
    if is_label(name) && name.starts_with(|first: char| first.is_ascii_lowercase()) {
        return Ok(());
    }
    Err("a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic \
         character, and end with an alphanumeric character (e.g. 'my-name',  or 'abc-123', regex used for \
         validation is '[a-z]([-a-z0-9]*[a-z0-9])?')"
        .into())
}

/// Checks an RFC 1123 subdomain (the default rule for object names).
pub fn dns_subdomain(name: &str) -> Result<(), String> {
    if name.len() > SUBDOMAIN_BYTES_MAX {
        return Err(format!("must be no more than {SUBDOMAIN_BYTES_MAX} bytes"));
    }
    if !name.is_empty() && name.split('.').all(is_label) {
        return Ok(());
    }
    Err("a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and \
         must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation \
         is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')"
        .into())
}

fn is_label(label: &str) -> bool {
    let bytes = label.as_bytes();
    let alphanumeric = |b: &u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    match (bytes.first(), bytes.last()) {
        (Some(first), Some(last)) => {
            alphanumeric(first) && alphanumeric(last) && bytes.iter().all(|b| alphanumeric(b) || *b == b'-')
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_and_subdomains() {
        for good in ["a", "a-b", "0", "x1-2-3z"] {
            assert_eq!(dns_label(good), Ok(()), "{good}");
        }
        for bad in ["", "-a", "a-", "A", "a_b", "a.b", &"a".repeat(64)] {
            assert!(dns_label(bad).is_err(), "{bad}");
        }
        assert_eq!(dns_subdomain("a.b-c.d"), Ok(()));
        for bad in ["", ".a", "a..b", "a.-b", &"a".repeat(254)] {
            assert!(dns_subdomain(bad).is_err(), "{bad}");
        }
    }
}
