//! Questions about oneself: `kubectl auth can-i`, `kubectl auth whoami`.

use k8s_openapi::api::{
    authentication::v1::SelfSubjectReview,
    authorization::v1::{SelfSubjectAccessReview, SelfSubjectRulesReview},
};

use super::{Backing, Kind, verb_sets};

pub(super) fn kinds() -> Vec<Kind> {
    fn question(kind: Kind) -> Kind {
        Kind {
            backing: Backing::Review,
            verbs: verb_sets::CREATE,
            namespaced: false,
            status: false,
            on_create: |_| {},
            ..kind
        }
    }
    vec![
        question(Kind::built_in::<SelfSubjectReview>("selfsubjectreview")),
        question(Kind::built_in::<SelfSubjectAccessReview>("selfsubjectaccessreview")),
        question(Kind::built_in::<SelfSubjectRulesReview>("selfsubjectrulesreview")),
    ]
}
