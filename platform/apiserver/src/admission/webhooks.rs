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
//! Webhooks and policies concern creations, updates, deletions, writes of subresources, and connections (`exec`,
//! `attach`, `port-forward`), but never the configurations of webhooks and policies.

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
    review::{Review, WebhookVerdict},
    rules::Webhook,
};
pub(crate) use self::{
    review::{AdmissionAttributes, Denied},
    rules::AdmissionOperation,
};
use super::{
    matching::{AdmissionValues, MatchedWrite},
    policies::{AdmissionPolicy, RegisteredPolicies},
};
use crate::{
    object::Object,
    registry::{Kind, registry},
    server::ServerState,
    status::ApiError,
    subresources::{scale_object, take_replicas},
    verbs::{self, Part, WriteRequest, prepare},
};

const GROUP: &str = "admissionregistration.k8s.io";
const MUTATING: &str = "mutatingwebhookconfigurations";
const VALIDATING: &str = "validatingwebhookconfigurations";
const POLICIES: &str = "validatingadmissionpolicies";
const BINDINGS: &str = "validatingadmissionpolicybindings";

/// The registered webhooks, and the policies beside them.
#[derive(Default)]
pub(crate) struct Webhooks {
    current: RwLock<Arc<Registered>>,
}

/// Webhooks in the order of their configurations' names.
#[derive(Default)]
struct Registered {
    mutating: Vec<Webhook>,
    validating: Vec<Webhook>,
    policies: RegisteredPolicies,
}

impl Webhooks {
    /// The policies that may concern a write of a kind.
    pub(super) fn policies(&self, kind: &Kind) -> RegisteredPolicies {
        if is_configuration(kind) { Arc::default() } else { Arc::clone(&self.current.read().policies) }
    }

    /// Reads the configurations from the store.
    pub(crate) fn reload(&self, store: &Store) {
        let read = |plural: &str| {
            let mut configurations = stored(store, plural);
            configurations.sort_by(|left, right| left.name().cmp(right.name()));
            configurations.iter().flat_map(Webhook::of_configuration).collect()
        };
        let policies = AdmissionPolicy::all(stored(store, POLICIES), &stored(store, BINDINGS));
        *self.current.write() = Arc::new(Registered {
            mutating: read(MUTATING),
            validating: read(VALIDATING),
            policies: Arc::new(policies),
        });
    }

    /// Reads the configurations again if a write of this kind has changed them.
    pub(crate) fn wrote(&self, kind: &Kind, store: &Store) {
        if is_configuration(kind) {
            self.reload(store);
        }
    }
}

fn is_configuration(kind: &Kind) -> bool {
    kind.group == GROUP && matches!(kind.plural, MUTATING | VALIDATING | POLICIES | BINDINGS)
}

fn stored(store: &Store, plural: &str) -> Vec<Object> {
    let Some(kind) = registry().find(GROUP, "v1", plural) else { return Vec::new() };
    let list = store.list(&Range::resource(registry().store_resource(kind)), &ListOptions::default());
    let entries = list.map(|list| list.entries).unwrap_or_default();
    entries.iter().filter_map(|entry| Object::from_entry(entry).ok()).collect()
}

/// The webhooks that a write concerns.
pub(crate) struct MatchedWebhooks {
    registered: Arc<Registered>,
    mutating: Vec<usize>,
    validating: Vec<usize>,
}

impl ServerState {
    /// The webhooks that concern a write; `None` if there are none. `new` is `None` for a deletion, `old` for a
    /// creation.
    pub(crate) fn matched_webhooks(
        &self,
        attributes: &AdmissionAttributes<'_>,
        new: Option<&Object>,
        old: Option<&Object>,
    ) -> Option<MatchedWebhooks> {
        let request = attributes.request;
        let registered = self.webhooks.current.read().clone();
        if (registered.mutating.is_empty() && registered.validating.is_empty())
            || is_configuration(request.kind)
        {
            return None;
        }
        let namespace = self.labels_of_namespace(request, new.or(old));
        let write = MatchedWrite {
            kind: request.kind,
            subresource: attributes.subresource,
            operation: attributes.operation,
            namespace: namespace.as_ref(),
            objects: [new, old],
        };
        let matching = |webhooks: &[Webhook]| -> Vec<usize> {
            let concerns = |webhook: &Webhook| webhook.resources.concerns(&write);
            webhooks.iter().enumerate().filter(|(_, webhook)| concerns(webhook)).map(|(at, _)| at).collect()
        };
        let (mutating, validating) = (matching(&registered.mutating), matching(&registered.validating));
        (!mutating.is_empty() || !validating.is_empty()).then_some(MatchedWebhooks {
            registered,
            mutating,
            validating,
        })
    }

    /// The labels that a namespace selector is compared with; `None` for a cluster-scoped object, which every
    /// namespace selector selects. A Namespace itself is compared with its own labels.
    pub(super) fn labels_of_namespace(
        &self,
        request: &WriteRequest,
        object: Option<&Object>,
    ) -> Option<Value> {
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
        attributes: &AdmissionAttributes<'_>,
        matched: &MatchedWebhooks,
        mut new: Option<&mut Object>,
        old: Option<&Object>,
    ) -> Result<Vec<String>, ApiError> {
        let mut warnings = Vec::new();
        let mutating = matched.mutating.iter().map(|at| &matched.registered.mutating[*at]);
        let mut changes = Vec::new();
        for webhook in mutating.clone() {
            let changed = self.call_mutating(attributes, webhook, &mut new, old, &mut warnings).await?;
            changes.push(changed);
        }
        // Calls webhooks with the reinvocation policy IfNeeded again after a later one has changed the object.
        for (at, webhook) in mutating.enumerate() {
            let changed_later = changes[at + 1..].iter().any(|changed| *changed);
            if webhook.reinvoke && changed_later {
                self.call_mutating(attributes, webhook, &mut new, old, &mut warnings).await?;
            }
        }
        let review = Review { attributes, new: new.as_deref(), old };
        let mut validating = Vec::new();
        for webhook in matched.validating.iter().map(|at| &matched.registered.validating[*at]) {
            if self.is_wanted(webhook, &review)? {
                validating.push(webhook);
            }
        }
        for verdict in join_all(validating.into_iter().map(|webhook| self.ask(webhook, &review))).await {
            warnings.extend(verdict?.warnings);
        }
        Ok(warnings)
    }

    /// Lets webhooks decide about an update of a part of an object, and change it. Returns their warnings.
    pub(crate) async fn review_update(
        &self,
        attributes: &AdmissionAttributes<'_>,
        part: Part,
        new: &mut Object,
        current: &Object,
    ) -> Result<Vec<String>, ApiError> {
        let kind = attributes.request.kind;
        if part == Part::Scale {
            let (mut scale, before) = (scale_object(kind, new), scale_object(kind, current));
            let Some(matched) = self.matched_webhooks(attributes, Some(&scale), Some(&before)) else {
                return Ok(Vec::new());
            };
            let called = self.call_webhooks(attributes, &matched, Some(&mut scale), Some(&before));
            let warnings = called.await?;
            take_replicas(kind, new, scale)?;
            return Ok(warnings);
        }
        let Some(matched) = self.matched_webhooks(attributes, Some(new), Some(current)) else {
            return Ok(Vec::new());
        };
        prepare(kind, part, new, current)?;
        if part == Part::Main {
            // Runs again before the write: the warnings of the second run count.
            drop(self.admit(attributes.request, new, Some(current)).await?);
        }
        self.call_webhooks(attributes, &matched, Some(new), Some(current)).await
    }

    /// Checks the update of a part of an object against the policies. Returns the warnings.
    pub(crate) fn check_policies_of_update(
        &self,
        attributes: &AdmissionAttributes<'_>,
        part: Part,
        new: &Object,
        current: &Object,
    ) -> Result<Vec<String>, ApiError> {
        let kind = attributes.request.kind;
        if part != Part::Scale {
            return self.check_policies(attributes, Some(new), Some(current));
        }
        let (scale, before) = (scale_object(kind, new), scale_object(kind, current));
        self.check_policies(attributes, Some(&scale), Some(&before))
    }

    /// Lets webhooks and policies decide about what is posted to a subresource, such as a binding, and change it. Returns
    /// their warnings.
    pub(crate) async fn review_posted(
        &self,
        attributes: &AdmissionAttributes<'_>,
        name: &str,
        body: &mut Value,
    ) -> Result<Vec<String>, ApiError> {
        let Value::Object(map) = std::mem::take(body) else {
            return Err(ApiError::bad_request("the body is not a JSON object"));
        };
        let mut object = Object(map);
        for (field, value) in [("name", name), ("namespace", attributes.request.namespace.as_str())] {
            object.meta_mut().entry(field).or_insert_with(|| value.into());
        }
        let mut warnings = Vec::new();
        if let Some(matched) = self.matched_webhooks(attributes, Some(&object), None) {
            warnings = self.call_webhooks(attributes, &matched, Some(&mut object), None).await?;
        }
        warnings.extend(self.check_policies(attributes, Some(&object), None)?);
        *body = Value::Object(object.0);
        Ok(warnings)
    }

    /// Calls one mutating webhook; returns whether it changed the object.
    async fn call_mutating(
        &self,
        attributes: &AdmissionAttributes<'_>,
        webhook: &Webhook,
        new: &mut Option<&mut Object>,
        old: Option<&Object>,
        warnings: &mut Vec<String>,
    ) -> Result<bool, ApiError> {
        let review = Review { attributes, new: new.as_deref(), old };
        if !self.is_wanted(webhook, &review)? {
            return Ok(false);
        }
        let verdict = self.ask(webhook, &review).await?;
        warnings.extend(verdict.warnings);
        let (Some(patch), Some(object)) = (verdict.patch, new.as_deref_mut()) else { return Ok(false) };
        let kind = attributes.is_object().then_some(attributes.request.kind);
        let patched = review::patched(kind, object, &patch)
            .map_err(|why| ApiError::webhook_failed(&webhook.name, &why))?;
        let changed = patched != *object;
        *object = patched;
        Ok(changed)
    }

    /// The verdict of one webhook. A failed call refuses the request, unless the webhook's policy is Ignore.
    async fn ask(&self, webhook: &Webhook, review: &Review<'_>) -> Result<WebhookVerdict, ApiError> {
        let body = review.body();
        let call = WebhookCall { webhook, body: &body, endpoint: self.webhook_endpoint(webhook) };
        match call.send().await.and_then(|answer| WebhookVerdict::parse(&answer, &body)) {
            Ok(verdict) => match &verdict.denied {
                None => Ok(verdict),
                Some(denied) => Err(ApiError::webhook_denied(&webhook.name, denied)),
            },
            Err(why) if webhook.ignores_failures => {
                tracing::warn!(webhook = %webhook.name, %why, "cannot call an admission webhook; its policy is Ignore");
                Ok(WebhookVerdict::default())
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

    /// Whether a webhook's conditions hold of a write. If they cannot be evaluated, the failure policy decides.
    fn is_wanted(&self, webhook: &Webhook, review: &Review<'_>) -> Result<bool, ApiError> {
        if webhook.conditions.is_empty() {
            return Ok(true);
        }
        let objects = [review.new, review.old];
        let values = AdmissionValues::of(self, review.attributes, objects);
        webhook.conditions.hold(&values, &values.context()).or_else(|why| {
            if webhook.ignores_failures {
                return Ok(false);
            }
            let name = objects.into_iter().flatten().next().map_or("", Object::name);
            Err(ApiError::forbidden(review.attributes.request.kind, name, &why))
        })
    }
}

/// Whether an object after its mutation still fits its kind.
fn check(kind: &Kind, object: &mut Object) -> Result<(), String> {
    verbs::check(kind, object).map_err(|error| error.message)
}
