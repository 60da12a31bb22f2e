//! Admission: the stage between defaulting and validation in which an object is completed or refused by means of
//! other objects. Each plugin is one of upstream's (`plugin/pkg/admission`) and receives the request's user, the new
//! and the old object, and whether the request is a dry run.

mod limits;
mod matching;
pub(crate) mod node_restriction;
mod pod_security;
mod pod_security_rules;
mod pods;
mod policies;
mod quota;
mod quota_status;
mod runtime_class;
mod webhooks;

pub(crate) use self::{
    matching::{CONDITION_VARIABLES, admission_environment},
    pods::default_tolerations,
    quota_status::run as run_quota_status,
    webhooks::{AdmissionAttributes, AdmissionOperation, Denied, Webhooks},
};

use mayfly_store::{ListOptions, Range};
use tokio::sync::OwnedMutexGuard;

use crate::{
    object::{Object, map_at},
    pki::requested_groups,
    registry::registry,
    server::ServerState,
    status::ApiError,
    verbs::{WriteRequest, key},
};

/// The warnings of admission, and the lock that has to be held until the object is written.
#[derive(Debug, Default)]
pub(crate) struct Admitted {
    pub(crate) warnings: Vec<String>,
    _quota: Option<OwnedMutexGuard<()>>,
}

impl ServerState {
    /// Runs all plugins on an object that is created (`old` is `None`) or updated.
    pub(crate) async fn admit(
        &self,
        request: &WriteRequest,
        new: &mut Object,
        old: Option<&Object>,
    ) -> Result<Admitted, ApiError> {
        let kind = request.kind;
        self.check_escalation(kind, &request.user, new, old)?;
        match (kind.group, kind.plural, old) {
            ("", "pods", None) => {
                self.apply_limits(request, new)?;
                self.admit_pod(request, new)?;
            }
            ("", "persistentvolumeclaims", None) => {
                self.default_storage_class(new);
                self.apply_limits(request, new)?;
            }
            ("networking.k8s.io", "ingresses", None) => self.default_ingress_class(new),
            ("scheduling.k8s.io", "priorityclasses", _) => self.only_default_priority(request, new)?,
            ("", "nodes", None) if !request.user.is_in_process() => taint_new_node(new),
            ("certificates.k8s.io", "certificatesigningrequests", None) => {
                signing_request_user(request, new);
                restrict_subject(request, new)?;
            }
            _ => {}
        }
        // A pod update can change no field that a pod security level restricts.
        let warnings = match (kind.group, kind.plural, old) {
            ("", "pods", Some(_)) => Vec::new(),
            _ => self.check_pod_security(request, new, old)?,
        };
        if !kind.namespaced || old.is_some_and(|_| !quota::counts_updates(kind)) {
            return Ok(Admitted { warnings, _quota: None });
        }
        Ok(Admitted { warnings, _quota: self.check_quota(request, new, old).await? })
    }

    /// The objects of a kind in a namespace (empty: cluster-scoped).
    fn objects(&self, group: &str, plural: &str, namespace: &str) -> Vec<Object> {
        let Some(kind) = registry().find(group, "v1", plural) else { return Vec::new() };
        let resource = registry().store_resource(kind);
        let range = match namespace {
            "" => Range::resource(resource),
            namespace => Range::namespace(resource, namespace),
        };
        let list = self.store.list(&range, &ListOptions::default()).map(|list| list.entries);
        list.unwrap_or_default().iter().filter_map(|entry| Object::from_entry(entry).ok()).collect()
    }

    fn object(&self, group: &str, plural: &str, namespace: &str, name: &str) -> Option<Object> {
        let kind = registry().find(group, "v1", plural)?;
        Object::from_entry(&*self.store.get(&key(kind, namespace, name))?).ok()
    }

    /// A claim without a class gets the newest default one.
    fn default_storage_class(&self, claim: &mut Object) {
        let annotation = ["metadata", "annotations", "volume.beta.kubernetes.io/storage-class"];
        if claim.at(&["spec", "storageClassName"]).is_some() || claim.at(&annotation).is_some() {
            return;
        }
        let default = "storageclass.kubernetes.io/is-default-class";
        if let Some(class) = self.default_class("storage.k8s.io", "storageclasses", default) {
            claim.map_mut("spec").insert("storageClassName".into(), class.into());
        }
    }

    /// An Ingress without a class gets the newest default one (the plugin DefaultIngressClass).
    fn default_ingress_class(&self, ingress: &mut Object) {
        let annotation = ["metadata", "annotations", "kubernetes.io/ingress.class"];
        if ingress.at(&["spec", "ingressClassName"]).is_some() || ingress.at(&annotation).is_some() {
            return;
        }
        let default = "ingressclass.kubernetes.io/is-default-class";
        if let Some(class) = self.default_class("networking.k8s.io", "ingressclasses", default) {
            ingress.map_mut("spec").insert("ingressClassName".into(), class.into());
        }
    }

    /// The newest of the classes with an annotation that makes them the default.
    fn default_class(&self, group: &str, plural: &str, annotation: &str) -> Option<String> {
        let mut classes = self.objects(group, plural, "");
        classes.retain(|class| class.str_at(&["metadata", "annotations", annotation]) == "true");
        classes.sort_by_key(|class| {
            (std::cmp::Reverse(class.meta_str("creationTimestamp").to_owned()), class.name().to_owned())
        });
        classes.first().map(|class| class.name().to_owned())
    }

    /// Refuses a second default PriorityClass (the plugin Priority).
    fn only_default_priority(&self, request: &WriteRequest, new: &Object) -> Result<(), ApiError> {
        let is_default =
            |class: &Object| class.at(&["globalDefault"]) == Some(&serde_json::Value::Bool(true));
        let classes = self.objects("scheduling.k8s.io", "priorityclasses", "");
        let other = classes.iter().find(|class| is_default(class) && class.name() != new.name());
        match other.filter(|_| is_default(new)) {
            Some(other) => {
                let name = other.name();
                let why =
                    format!("PriorityClass {name} is already marked as default. Only one default can exist");
                Err(ApiError::forbidden(request.kind, new.name(), &why))
            }
            None => Ok(()),
        }
    }
}

/// Taints a new node so that it gets no pods before it is ready (the plugin TaintNodesByCondition).
fn taint_new_node(node: &mut Object) {
    let taint = serde_json::json!({"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"});
    let taints = node.map_mut("spec").entry("taints").or_insert_with(|| serde_json::json!([]));
    if let serde_json::Value::Array(taints) = taints
        && !taints.iter().any(|known| known["key"] == taint["key"] && known["effect"] == taint["effect"])
    {
        taints.push(taint);
    }
}

/// Refuses a client certificate of the administrators' group (the plugin CertificateSubjectRestriction): its holder
/// could not be restrained by any role.
fn restrict_subject(request: &WriteRequest, new: &Object) -> Result<(), ApiError> {
    if new.str_at(&["spec", "signerName"]) != "kubernetes.io/kube-apiserver-client" {
        return Ok(());
    }
    let groups = requested_groups(new.str_at(&["spec", "request"]));
    match groups.iter().any(|group| group == "system:masters") {
        true => Err(ApiError::forbidden(
            request.kind,
            new.name(),
            "use of kubernetes.io/kube-apiserver-client signer with system:masters group is not allowed",
        )),
        false => Ok(()),
    }
}

/// Sets the requester of a certificate to the user of the request.
fn signing_request_user(request: &WriteRequest, new: &mut Object) {
    let user = &request.user;
    let spec = map_at(&mut new.0, "spec");
    spec.insert("username".into(), user.name.as_str().into());
    spec.insert("groups".into(), user.groups.iter().map(String::as_str).collect());
    for (field, value) in
        [("uid", serde_json::Value::from(user.uid.as_str())), ("extra", serde_json::json!(user.extra))]
    {
        match (field, user.uid.is_empty(), user.extra.is_empty()) {
            ("uid", true, _) | ("extra", _, true) => _ = spec.remove(field),
            _ => _ = spec.insert(field.into(), value),
        }
    }
}
