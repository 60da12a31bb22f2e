//! Admission webhooks: servers of the cluster's users that complete or refuse objects (upstream's
//! `apiserver/pkg/admission/plugin/webhook`).
//!
//! ```text
//!   defaults ──▶ built-in plugins ──▶ mutating webhooks, one after the other ──▶ defaults
//!            ──▶ validating webhooks, at the same time ──▶ built-in plugins again ──▶ validation ──▶ write
//! ```
//!
//! A webhook may take 30 s, so no lock is held while one is called: the built-in plugins run once before, so that the
//! webhooks see what they complete, and once more under the locks of the write. Requests that no webhook concerns pay
//! for a read of an empty list.
//!
//! Webhooks concern creations, updates of the object itself, and deletions. They are not called for subresources and
//! for connections (`exec`, `attach`, `port-forward`), and never for the configurations of webhooks.

mod client;
mod review;
mod rules;

use std::sync::Arc;

use futures::future::join_all;
use mayfly_store::{ListOptions, Range, Store};
use parking_lot::RwLock;
use serde_json::Value;

use self::{
    client::WebhookCall,
    review::{Review, Verdict},
    rules::Webhook,
};
pub(crate) use self::{review::Denied, rules::AdmissionOperation};
use crate::{
    object::Object,
    registry::{Kind, registry},
    server::Inner,
    status::ApiError,
    verbs::{self, WriteRequest},
};

const GROUP: &str = "admissionregistration.k8s.io";
const MUTATING: &str = "mutatingwebhookconfigurations";
const VALIDATING: &str = "validatingwebhookconfigurations";

/// The registered webhooks.
#[derive(Default)]
pub(crate) struct Webhooks {
    current: RwLock<Arc<Registered>>,
}

/// Webhooks in the order of their configurations' names.
#[derive(Default)]
struct Registered {
    mutating: Vec<Webhook>,
    validating: Vec<Webhook>,
}

impl Webhooks {
    /// Reads the configurations from the store.
    pub(crate) fn reload(&self, store: &Store) {
        let read = |plural: &str| {
            let mut configurations = stored(store, plural);
            configurations.sort_by(|left, right| left.name().cmp(right.name()));
            configurations.iter().flat_map(Webhook::of_configuration).collect()
        };
        *self.current.write() =
            Arc::new(Registered { mutating: read(MUTATING), validating: read(VALIDATING) });
    }

    /// Reads the configurations again if a write of this kind has changed them.
    pub(crate) fn wrote(&self, kind: &Kind, store: &Store) {
        if is_configuration(kind) {
            self.reload(store);
        }
    }
}

fn is_configuration(kind: &Kind) -> bool {
    kind.group == GROUP && matches!(kind.plural, MUTATING | VALIDATING)
}

fn stored(store: &Store, plural: &str) -> Vec<Object> {
    let Some(kind) = registry().find(GROUP, "v1", plural) else { return Vec::new() };
    let list = store.list(&Range::resource(registry().store_resource(kind)), &ListOptions::default());
    let entries = list.map(|list| list.entries).unwrap_or_default();
    entries.iter().filter_map(|entry| Object::from_entry(entry).ok()).collect()
}

/// The webhooks that a write concerns.
pub(crate) struct Concerned {
    registered: Arc<Registered>,
    mutating: Vec<usize>,
    validating: Vec<usize>,
}

impl Inner {
    /// The webhooks that concern a write; `None` if there are none. `new` is `None` for a deletion, `old` for a
    /// creation.
    pub(crate) fn concerned_webhooks(
        &self,
        request: &WriteRequest,
        operation: AdmissionOperation,
        new: Option<&Object>,
        old: Option<&Object>,
    ) -> Option<Concerned> {
        let registered = self.webhooks.current.read().clone();
        if (registered.mutating.is_empty() && registered.validating.is_empty())
            || is_configuration(request.kind)
        {
            return None;
        }
        let namespace = self.labels_of_namespace(request, new.or(old));
        let matching = |webhooks: &[Webhook]| -> Vec<usize> {
            let concerns =
                |webhook: &Webhook| webhook.concerns(request.kind, operation, namespace.as_ref(), [new, old]);
            webhooks.iter().enumerate().filter(|(_, webhook)| concerns(webhook)).map(|(at, _)| at).collect()
        };
        let (mutating, validating) = (matching(&registered.mutating), matching(&registered.validating));
        (!mutating.is_empty() || !validating.is_empty()).then_some(Concerned {
            registered,
            mutating,
            validating,
        })
    }

    /// The labels that a namespace selector is compared with; `None` for a cluster-scoped object, which every
    /// namespace selector selects. A Namespace itself is compared with its own labels.
    fn labels_of_namespace(&self, request: &WriteRequest, object: Option<&Object>) -> Option<Value> {
        let labels = |object: &Object| object.at(&["metadata", "labels"]).cloned().unwrap_or(Value::Null);
        if (request.kind.group, request.kind.plural) == ("", "namespaces") {
            return object.map(labels);
        }
        if !request.kind.namespaced {
            return None;
        }
        Some(self.object("", "namespaces", "", &request.namespace).as_ref().map_or(Value::Null, labels))
    }

    /// Calls the mutating webhooks, which may change `new`, then the validating ones. Returns their warnings.
    pub(crate) async fn call_webhooks(
        &self,
        request: &WriteRequest,
        operation: AdmissionOperation,
        concerned: &Concerned,
        mut new: Option<&mut Object>,
        old: Option<&Object>,
    ) -> Result<Vec<String>, ApiError> {
        let mut warnings = Vec::new();
        let mutating = concerned.mutating.iter().map(|at| &concerned.registered.mutating[*at]);
        let mut changes = Vec::new();
        for webhook in mutating.clone() {
            let changed =
                self.call_mutating(request, operation, webhook, &mut new, old, &mut warnings).await?;
            changes.push(changed);
        }
        // Calls webhooks with the reinvocation policy IfNeeded again after a later one has changed the object.
        for (at, webhook) in mutating.enumerate() {
            let changed_later = changes[at + 1..].iter().any(|changed| *changed);
            if webhook.reinvoke && changed_later {
                self.call_mutating(request, operation, webhook, &mut new, old, &mut warnings).await?;
            }
        }
        let review = Review { request, operation, new: new.as_deref(), old };
        let validating = concerned.validating.iter().map(|at| &concerned.registered.validating[*at]);
        for verdict in join_all(validating.map(|webhook| self.ask(webhook, &review))).await {
            warnings.extend(verdict?.warnings);
        }
        Ok(warnings)
    }

    /// Calls one mutating webhook; returns whether it changed the object.
    async fn call_mutating(
        &self,
        request: &WriteRequest,
        operation: AdmissionOperation,
        webhook: &Webhook,
        new: &mut Option<&mut Object>,
        old: Option<&Object>,
        warnings: &mut Vec<String>,
    ) -> Result<bool, ApiError> {
        let review = Review { request, operation, new: new.as_deref(), old };
        let verdict = self.ask(webhook, &review).await?;
        warnings.extend(verdict.warnings);
        let (Some(patch), Some(object)) = (verdict.patch, new.as_deref_mut()) else { return Ok(false) };
        let patched = review::patched(request.kind, object, &patch)
            .map_err(|why| ApiError::webhook_failed(&webhook.name, &why))?;
        let changed = patched != *object;
        *object = patched;
        Ok(changed)
    }

    /// The verdict of one webhook. A failed call refuses the request, unless the webhook's policy is Ignore.
    async fn ask(&self, webhook: &Webhook, review: &Review<'_>) -> Result<Verdict, ApiError> {
        let body = review.body();
        let call = WebhookCall { webhook, body: &body, endpoint: self.webhook_endpoint(webhook) };
        match call.send().await.and_then(|answer| Verdict::parse(&answer, &body)) {
            Ok(verdict) => match &verdict.denied {
                None => Ok(verdict),
                Some(denied) => Err(ApiError::webhook_denied(&webhook.name, denied)),
            },
            Err(why) if webhook.ignores_failures => {
                tracing::warn!(webhook = %webhook.name, %why, "cannot call an admission webhook; its policy is Ignore");
                Ok(Verdict::default())
            }
            Err(why) => Err(ApiError::webhook_failed(&webhook.name, &why)),
        }
    }

    /// The address of a ready endpoint of the Service that a webhook names, or the reason why there is none. `None`
    /// for a webhook with a URL.
    fn webhook_endpoint(&self, webhook: &Webhook) -> Option<Result<std::net::SocketAddr, String>> {
        let service = webhook.service.as_ref()?;
        Some(service.endpoint(
            self.object("", "services", &service.namespace, &service.name).as_ref(),
            &self.objects("discovery.k8s.io", "endpointslices", &service.namespace),
        ))
    }
}

/// Whether an object after its mutation still fits its kind.
fn check(kind: &Kind, object: &mut Object) -> Result<(), String> {
    verbs::check(kind, object).map_err(|error| error.message)
}
