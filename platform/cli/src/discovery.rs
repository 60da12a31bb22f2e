//! The kinds that the server serves, by their names on the command line: `functions`, `fn`, `Function`,
//! `functions.mayfly.dev`, `all`.

use kube::client::{APIGroupDiscoveryList, APIResourceDiscovery};

use super::{
    failure::{ErrorCode, Failure},
    server::{Server, segment},
};

/// A kind, and the group and version that serve it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DiscoveredKind {
    pub(crate) group: String,
    pub(crate) version: String,
    pub(crate) kind: String,
    pub(crate) plural: String,
    singular: String,
    short_names: Vec<String>,
    categories: Vec<String>,
    pub(crate) namespaced: bool,
    verbs: Vec<String>,
}

impl DiscoveredKind {
    pub(crate) fn api_version(&self) -> String {
        match self.group.as_str() {
            "" => self.version.clone(),
            group => format!("{group}/{}", self.version),
        }
    }

    /// The path of a collection in a namespace, such as `/apis/mayfly.dev/v1/namespaces/default/functions`, or in all
    /// namespaces.
    pub(crate) fn collection(&self, namespace: Option<&str>) -> String {
        let mut path = match self.group.as_str() {
            "" => format!("/api/{}", self.version),
            group => format!("/apis/{group}/{}", self.version),
        };
        if let Some(namespace) = namespace.filter(|_| self.namespaced) {
            path.push_str(&format!("/namespaces/{}", segment(namespace)));
        }
        format!("{path}/{}", self.plural)
    }

    /// The path of one object.
    pub(crate) fn object(&self, namespace: &str, name: &str) -> String {
        format!("{}/{}", self.collection(Some(namespace)), segment(name))
    }

    /// The object's name in kubectl's form, such as `function.mayfly.dev/hello`.
    pub(crate) fn full_name(&self, name: &str) -> String {
        match self.group.as_str() {
            "" => format!("{}/{name}", self.singular_name()),
            group => format!("{}.{group}/{name}", self.singular_name()),
        }
    }

    pub(crate) fn singular_name(&self) -> String {
        match self.singular.as_str() {
            "" => self.kind.to_ascii_lowercase(),
            singular => singular.to_owned(),
        }
    }

    fn can(&self, verb: &str) -> bool {
        self.verbs.iter().any(|known| known == verb)
    }

    fn is_called(&self, word: &str) -> bool {
        let plain = word.split_once('.').map_or(word, |(plain, _)| plain);
        let named = self.plural == plain
            || self.singular_name() == plain
            || self.kind.to_ascii_lowercase() == plain
            || self.short_names.iter().any(|short| short == plain);
        let qualified = word.split_once('.').is_none_or(|(_, rest)| {
            rest == self.group || rest == format!("{}.{}", self.version, self.group) || rest == self.version
        });
        named && qualified
    }
}

/// All kinds that the server serves.
#[derive(Debug)]
pub(crate) struct Discovery {
    kinds: Vec<DiscoveredKind>,
}

impl Discovery {
    pub(crate) async fn fetch(server: &Server) -> anyhow::Result<Self> {
        let core = server.client().list_core_api_versions_aggregated().await?;
        let groups = server.client().list_api_groups_aggregated().await?;
        Ok(Self::from_lists(&[core, groups]))
    }

    fn from_lists(lists: &[APIGroupDiscoveryList]) -> Self {
        let mut kinds = Vec::new();
        for group in lists.iter().flat_map(|list| &list.items) {
            let name = group.metadata.as_ref().and_then(|metadata| metadata.name.clone()).unwrap_or_default();
            for version in &group.versions {
                let version_name = version.version.clone().unwrap_or_default();
                kinds.extend(
                    version.resources.iter().filter_map(|resource| kind(&name, &version_name, resource)),
                );
            }
        }
        Self { kinds }
    }

    /// The kind with this name. Core kinds have precedence, then groups in the server's order.
    pub(crate) fn find(&self, word: &str) -> anyhow::Result<&DiscoveredKind> {
        let lower = word.to_ascii_lowercase();
        self.kinds.iter().find(|kind| kind.is_called(&lower)).ok_or_else(|| {
            // The names of all listable kinds, each once: two groups may share a name (nodes and their metrics).
            let mut known: Vec<&str> = Vec::new();
            for kind in self.kinds.iter().filter(|kind| kind.can("list")) {
                if !known.contains(&kind.plural.as_str()) {
                    known.push(&kind.plural);
                }
            }
            Failure::error(
                ErrorCode::NotFound,
                format!("the server has no kind {word:?}"),
                format!("it has: {}", known.join(", ")),
            )
        })
    }

    /// The kinds of a comma-separated list of names; a category such as `all` stands for several.
    pub(crate) fn find_all(&self, words: &str) -> anyhow::Result<Vec<&DiscoveredKind>> {
        let mut found: Vec<&DiscoveredKind> = Vec::new();
        for word in words.split(',').filter(|word| !word.is_empty()) {
            let category: Vec<_> = self
                .kinds
                .iter()
                .filter(|kind| kind.can("list") && kind.categories.iter().any(|category| category == word))
                .collect();
            let meant = if category.is_empty() { vec![self.find(word)?] } else { category };
            for kind in meant {
                if !found.contains(&kind) {
                    found.push(kind);
                }
            }
        }
        if found.is_empty() {
            return Err(Failure::error(ErrorCode::Usage, "no kind was named", "name one, such as functions"));
        }
        Ok(found)
    }

    /// The kinds whose objects can be listed and deleted, each in one version.
    pub(crate) fn deletable(&self) -> Vec<&DiscoveredKind> {
        let mut found: Vec<&DiscoveredKind> = Vec::new();
        for kind in self.kinds.iter().filter(|kind| kind.can("list") && kind.can("delete")) {
            if !found.iter().any(|known| (&known.group, &known.plural) == (&kind.group, &kind.plural)) {
                found.push(kind);
            }
        }
        found
    }

    /// The kind of a manifest.
    pub(crate) fn of_manifest(&self, api_version: &str, kind: &str) -> anyhow::Result<&DiscoveredKind> {
        let exact = self.kinds.iter().find(|known| known.kind == kind && known.api_version() == api_version);
        exact.ok_or_else(|| {
            let todo = match self.kinds.iter().find(|known| known.kind.eq_ignore_ascii_case(kind)) {
                Some(near) => {
                    format!("the server has kind: {} in apiVersion: {}", near.kind, near.api_version())
                }
                None => "mayfly get with a wrong kind lists those the server has".to_owned(),
            };
            Failure::error(
                ErrorCode::NotFound,
                format!("the server has no kind {kind:?} in apiVersion {api_version:?}"),
                todo,
            )
        })
    }
}

fn kind(group: &str, version: &str, resource: &APIResourceDiscovery) -> Option<DiscoveredKind> {
    let response = resource.response_kind.as_ref()?;
    // The response kind contains its group only if it differs.
    let own = |given: &Option<String>, outer: &str| match given.as_deref() {
        None | Some("") => outer.to_owned(),
        Some(given) => given.to_owned(),
    };
    Some(DiscoveredKind {
        group: own(&response.group, group),
        version: own(&response.version, version),
        kind: response.kind.clone()?,
        plural: resource.resource.clone()?,
        singular: resource.singular_resource.clone().unwrap_or_default(),
        short_names: resource.short_names.clone(),
        categories: resource.categories.clone(),
        namespaced: resource.scope.as_deref() == Some("Namespaced"),
        verbs: resource.verbs.clone(),
    })
}

/// Kinds of a server, for tests.
#[cfg(test)]
pub(crate) fn for_tests() -> Discovery {
    let verbs = ["get", "list", "watch", "create", "patch", "delete"];
    let resource = |plural: &str, kind: &str, group: &str, short: &str, scope: &str| {
        serde_json::json!({"resource": plural, "responseKind": {"group": group, "version": "v1", "kind": kind},
            "scope": scope, "singularResource": kind.to_lowercase(), "shortNames": [short],
            "categories": if kind == "Node" { vec![] } else { vec!["all"] }, "verbs": verbs})
    };
    let list =
        |items: serde_json::Value| serde_json::from_value(serde_json::json!({"items": items})).unwrap();
    let core = serde_json::json!([{"metadata": {"name": ""}, "versions": [{"version": "v1", "resources": [
        resource("nodes", "Node", "", "no", "Cluster"), resource("pods", "Pod", "", "po", "Namespaced")]}]}]);
    let groups = serde_json::json!([{"metadata": {"name": "mayfly.dev"}, "versions": [{"version": "v1",
        "resources": [resource("functions", "Function", "mayfly.dev", "fn", "Namespaced")]}]}]);
    Discovery::from_lists(&[list(core), list(groups)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_means_a_kind() {
        let discovery = for_tests();
        for word in
            ["functions", "function", "fn", "Function", "FN", "functions.mayfly.dev", "fn.v1.mayfly.dev"]
        {
            assert_eq!(discovery.find(word).unwrap().kind, "Function", "{word}");
        }
        for word in ["fnx", "functions.other.dev", "", "pods.mayfly.dev"] {
            assert!(discovery.find(word).is_err(), "{word}");
        }
        let kinds = |words| {
            discovery.find_all(words).map(|kinds| kinds.iter().map(|k| k.kind.clone()).collect::<Vec<_>>())
        };
        assert_eq!(kinds("po,fn,pods").unwrap(), ["Pod", "Function"]);
        assert_eq!(kinds("all").unwrap(), ["Pod", "Function"]);
        assert!(kinds(",").is_err());
    }

    #[test]
    fn kinds_that_can_be_listed_are_named_once() {
        let mut discovery = for_tests();
        let mut more = discovery.kinds.clone();
        more.retain(|kind| kind.plural == "pods");
        more[0].group = "metrics.k8s.io".into();
        discovery.kinds.extend(more.clone());
        more[0].plural = "selfsubjectreviews".into();
        more[0].verbs = vec!["create".into()];
        discovery.kinds.extend(more);
        let error = discovery.find("nosuch").unwrap_err().to_string();
        assert!(error.ends_with("it has: nodes, pods, functions"), "{error}");
    }

    #[test]
    fn paths() {
        let discovery = for_tests();
        let (node, function) = (discovery.find("no").unwrap(), discovery.find("fn").unwrap());
        assert_eq!(node.object("ignored", "n1"), "/api/v1/nodes/n1");
        assert_eq!(function.object("ns", "hello"), "/apis/mayfly.dev/v1/namespaces/ns/functions/hello");
        assert_eq!(function.collection(None), "/apis/mayfly.dev/v1/functions");
        assert_eq!(function.full_name("hello"), "function.mayfly.dev/hello");
        assert_eq!(node.full_name("n1"), "node/n1");
    }

    #[test]
    fn a_wrong_manifest_kind_is_set_right() {
        let error = for_tests().of_manifest("mayfly/v1", "Function").unwrap_err().to_string();
        assert!(error.contains("kind: Function in apiVersion: mayfly.dev/v1"), "{error}");
    }
}
