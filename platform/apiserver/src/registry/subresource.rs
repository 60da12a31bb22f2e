//! The subresources of kinds.

/// A subresource besides `status`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Subresource {
    Scale,
    /// Listed so that `kubectl scale` sends its request, whose error names the fields to set instead.
    ScaleRejected,
    Log,
    Binding,
    Eviction,
    Finalize,
    /// `serviceaccounts/x/token`
    Token,
    /// `pods/x/ephemeralcontainers`
    EphemeralContainers,
    /// `certificatesigningrequests/x/approval`: the conditions of the status.
    Approval,
}

impl Subresource {
    /// Name, group, version and kind, verbs.
    pub(crate) fn describe(
        self,
    ) -> (&'static str, &'static str, &'static str, &'static str, &'static [&'static str]) {
        match self {
            Self::Scale => ("scale", "autoscaling", "v1", "Scale", &["get", "patch", "update"]),
            Self::ScaleRejected => ("scale", "autoscaling", "v1", "Scale", &[]),
            Self::Log => ("log", "", "", "", &["get"]),
            Self::Binding => ("binding", "", "v1", "Binding", &["create"]),
            Self::Eviction => ("eviction", "policy", "v1", "Eviction", &["create"]),
            Self::Finalize => ("finalize", "", "", "", &["update"]),
            Self::Token => ("token", "authentication.k8s.io", "v1", "TokenRequest", &["create"]),
            Self::EphemeralContainers => ("ephemeralcontainers", "", "", "", &["get", "patch", "update"]),
            Self::Approval => ("approval", "", "", "", &["get", "patch", "update"]),
        }
    }
}
