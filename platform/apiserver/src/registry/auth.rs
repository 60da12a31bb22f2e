//! Reviews: requests about users, tokens and rights that are answered and not kept (`kubectl auth can-i`,
//! `kubectl auth whoami`).

use k8s_openapi::api::{
    authentication::v1::{SelfSubjectReview, TokenReview},
    authorization::v1::{
        LocalSubjectAccessReview, SelfSubjectAccessReview, SelfSubjectRulesReview, SubjectAccessReview,
    },
};

use super::{Backing, Kind, verb_sets};

pub(super) fn kinds() -> Vec<Kind> {
    fn review(kind: Kind) -> Kind {
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
        review(Kind::built_in::<SelfSubjectReview>("selfsubjectreview")),
        review(Kind::built_in::<TokenReview>("tokenreview")),
        Kind {
            namespaced: true,
            ..review(Kind::built_in::<LocalSubjectAccessReview>("localsubjectaccessreview"))
        },
        review(Kind::built_in::<SelfSubjectAccessReview>("selfsubjectaccessreview")),
        review(Kind::built_in::<SelfSubjectRulesReview>("selfsubjectrulesreview")),
        review(Kind::built_in::<SubjectAccessReview>("subjectaccessreview")),
    ]
}
