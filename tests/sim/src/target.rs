//! The object that a request is about, from its path.

use std::fmt;

use mayfly_store::Key;

/// A resource, and an object or a subresource of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Target {
    resource: String,
    /// Absent for a collection.
    pub key: Option<Key>,
    pub subresource: String,
}

impl Target {
    /// A path that is none of an object gives an empty target.
    pub fn of(path: &str) -> Self {
        let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
        let (group, rest) = match parts.as_slice() {
            ["api", _version, rest @ ..] => ("", rest),
            ["apis", group, _version, rest @ ..] => (*group, rest),
            _ => return Self::default(),
        };
        let (namespace, rest) = match rest {
            ["namespaces", namespace, rest @ ..] if !rest.is_empty() && !is_of_namespace(rest) => {
                (*namespace, rest)
            }
            rest => ("", rest),
        };
        let [plural, rest @ ..] = rest else { return Self::default() };
        let resource = if group.is_empty() { (*plural).to_owned() } else { format!("{plural}.{group}") };
        let key = rest.first().map(|name| Key::new(resource.as_str(), namespace, *name));
        let subresource = rest.get(1).map_or(String::new(), |part| (*part).to_owned());
        Self { resource, key, subresource }
    }

    pub fn resource(&self) -> &str {
        &self.resource
    }
}

/// `/namespaces/NAME/status` and `/finalize` are subresources of the namespace.
fn is_of_namespace(rest: &[&str]) -> bool {
    matches!(rest, ["status" | "finalize"])
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.key {
            Some(key) => key.fmt(f)?,
            None => self.resource.fmt(f)?,
        }
        if self.subresource.is_empty() { Ok(()) } else { write!(f, "/{}", self.subresource) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_name_objects() {
        let shown = |path: &str| Target::of(path).to_string();
        assert_eq!(shown("/api/v1/namespaces/a/pods/b/binding"), "pods/a/b/binding");
        assert_eq!(shown("/apis/apps/v1/namespaces/a/deployments/b"), "deployments.apps/a/b");
        assert_eq!(shown("/apis/apps/v1/replicasets"), "replicasets.apps");
        assert_eq!(shown("/api/v1/namespaces/a"), "namespaces/a");
        assert_eq!(shown("/api/v1/namespaces/a/finalize"), "namespaces/a/finalize");
        assert_eq!(Target::of("/version"), Target::default());
    }
}
