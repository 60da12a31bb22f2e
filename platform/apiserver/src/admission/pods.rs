//! Completes a new pod from other objects: service account, priority and default tolerations; its runtime class is in
//! [`super::runtime_class`].

use mayfly_api::wellknown::{RUNTIME_CLASS_SLURM, RUNTIME_CLASS_WASM};
use serde_json::{Map, Value, json};

use crate::{
    object::Object, registry::rename_aliases, server::ServerState, status::ApiError, verbs::WriteRequest,
};

/// The mount path of the token of a pod's service account.
const TOKEN_PATH: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// The lifetime of such a token: upstream's hour and seven seconds.
const TOKEN_SECONDS: i64 = 3607;
const TOKEN_VOLUME_PREFIX: &str = "kube-api-access-";
/// The default time that a pod stays on a node that is not ready or unreachable, in seconds.
const TOLERATION_SECONDS: i64 = 300;
const TAINTS: [&str; 2] = ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"];

impl ServerState {
    pub(super) fn admit_pod(&self, request: &WriteRequest, pod: &mut Object) -> Result<(), ApiError> {
        rename_aliases(pod.map_mut("spec"));
        self.service_account(request, pod)?;
        self.priority(request, pod)?;
        default_tolerations(pod);
        self.apply_runtime_class(request, pod)
    }

    fn service_account(&self, request: &WriteRequest, pod: &mut Object) -> Result<(), ApiError> {
        let spec = pod.map_mut("spec");
        let given = ["serviceAccountName", "serviceAccount"].iter().find_map(|field| {
            spec.get(*field).and_then(Value::as_str).filter(|name| !name.is_empty()).map(str::to_owned)
        });
        let name = given.unwrap_or_else(|| "default".to_owned());
        spec.insert("serviceAccountName".into(), name.as_str().into());
        spec.insert("serviceAccount".into(), name.as_str().into());
        let namespace = &request.namespace;
        let Some(account) = self.object("", "serviceaccounts", namespace, &name) else {
            // Without the controller that creates it, a namespace has no default account.
            if name == "default" && !self.config.service_accounts_required {
                return Ok(());
            }
            let why = format!(
                "error looking up service account {namespace}/{name}: serviceaccount {name:?} not found"
            );
            return Err(ApiError::forbidden(request.kind, pod.name(), &why));
        };
        let spec = pod.map_mut("spec");
        let secrets = account.0.get("imagePullSecrets").cloned();
        if let Some(secrets) = secrets.filter(|_| !spec.contains_key("imagePullSecrets")) {
            spec.insert("imagePullSecrets".into(), secrets);
        }
        let mounts =
            |map: &Map<String, Value>| map.get("automountServiceAccountToken").and_then(Value::as_bool);
        let wanted = mounts(&*spec).or_else(|| mounts(&account.0)).unwrap_or(true);
        // A component gets no token: it cannot connect to the API. Neither does a batch job: it has no volumes.
        let class = spec.get("runtimeClassName").and_then(Value::as_str);
        let has_volumes = !matches!(class, Some(RUNTIME_CLASS_WASM | RUNTIME_CLASS_SLURM));
        if wanted && has_volumes && self.config.service_account_token_volumes {
            mount_token(spec);
        }
        Ok(())
    }

    fn priority(&self, request: &WriteRequest, pod: &mut Object) -> Result<(), ApiError> {
        let forbidden = |pod: &Object, why: String| Err(ApiError::forbidden(request.kind, pod.name(), &why));
        let name = pod.str_at(&["spec", "priorityClassName"]).to_owned();
        let class = match name.as_str() {
            "" => self.default_priority_class(),
            name => match self.object("scheduling.k8s.io", "priorityclasses", "", name) {
                Some(class) => Some(class),
                None => return forbidden(pod, format!("no PriorityClass with name {name} was found")),
            },
        };
        let number = |object: &Object, path: &[&str]| object.at(path).and_then(Value::as_i64);
        let value = class.as_ref().and_then(|class| number(class, &["value"])).unwrap_or(0);
        if let Some(given) = number(pod, &["spec", "priority"]).filter(|given| *given != value) {
            return forbidden(
                pod,
                format!(
                    "the integer value of priority ({given}) must not be provided in pod spec; priority admission \
                     controller computed {value} from the given PriorityClass name"
                ),
            );
        }
        let policy =
            class.as_ref().map_or("PreemptLowerPriority", |class| class.str_at(&["preemptionPolicy"]));
        let given = pod.str_at(&["spec", "preemptionPolicy"]);
        if !given.is_empty() && given != policy {
            let why = format!(
                "the string value of PreemptionPolicy ({given}) must not be provided in pod spec; priority admission \
                 controller computed {policy} from the given PriorityClass name"
            );
            return forbidden(pod, why);
        }
        let spec = pod.map_mut("spec");
        spec.insert("priority".into(), value.into());
        spec.insert("preemptionPolicy".into(), policy.into());
        if let Some(class) = class.filter(|_| name.is_empty()) {
            spec.insert("priorityClassName".into(), class.name().into());
        }
        Ok(())
    }

    /// The global default; of several the one with the lowest value.
    fn default_priority_class(&self) -> Option<Object> {
        let mut classes = self.objects("scheduling.k8s.io", "priorityclasses", "");
        classes.retain(|class| class.0.get("globalDefault") == Some(&Value::Bool(true)));
        classes.into_iter().min_by_key(|class| class.at(&["value"]).and_then(Value::as_i64))
    }
}

/// Adds the projected volume with a token, the authority's certificate and the namespace, and mounts it.
fn mount_token(spec: &mut Map<String, Value>) {
    let is_mounted = |container: &Value| {
        container["volumeMounts"]
            .as_array()
            .into_iter()
            .flatten()
            .any(|mount| mount["mountPath"] == TOKEN_PATH)
    };
    let all = ["initContainers", "containers"];
    let missing = all.iter().any(|list| {
        spec.get(*list).and_then(Value::as_array).into_iter().flatten().any(|one| !is_mounted(one))
    });
    if !missing {
        return;
    }
    let name = crate::meta::generate_name(TOKEN_VOLUME_PREFIX).unwrap_or_default();
    for list in all {
        let containers = spec.get_mut(list).and_then(Value::as_array_mut);
        for container in containers.into_iter().flatten().filter(|container| !is_mounted(container)) {
            let mount = json!({"name": name, "readOnly": true, "mountPath": TOKEN_PATH});
            match container.get_mut("volumeMounts").and_then(Value::as_array_mut) {
                Some(mounts) => mounts.push(mount),
                None => container["volumeMounts"] = json!([mount]),
            }
        }
    }
    let namespace =
        json!({"path": "namespace", "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"}});
    let volume = json!({"name": name, "projected": {"defaultMode": 0o644, "sources": [
        {"serviceAccountToken": {"expirationSeconds": TOKEN_SECONDS, "path": "token"}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {"downwardAPI": {"items": [namespace]}},
    ]}});
    match spec.get_mut("volumes").and_then(Value::as_array_mut) {
        Some(volumes) => volumes.push(volume),
        None => _ = spec.insert("volumes".into(), json!([volume])),
    }
}

/// Adds the default tolerations: a pod stays on a lost node for five minutes.
pub(crate) fn default_tolerations(pod: &mut Object) {
    let tolerations = pod.map_mut("spec").entry("tolerations").or_insert_with(|| json!([]));
    if tolerations.is_null() {
        *tolerations = json!([]);
    }
    let Some(list) = tolerations.as_array_mut() else { return };
    for taint in TAINTS {
        let tolerated = list.iter().any(|one| {
            let effect = one["effect"].as_str().unwrap_or("");
            let key = one["key"].as_str().unwrap_or("");
            (key == taint || key.is_empty()) && (effect == "NoExecute" || effect.is_empty())
        });
        if !tolerated {
            list.push(json!({"key": taint, "operator": "Exists", "effect": "NoExecute",
                "tolerationSeconds": TOLERATION_SECONDS}));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tolerations_are_added_where_none_is() {
        let tolerated = |own: Value| {
            let mut pod = Object(json!({"spec": {"tolerations": own}}).as_object().unwrap().clone());
            default_tolerations(&mut pod);
            pod.at(&["spec", "tolerations"]).and_then(Value::as_array).unwrap().len()
        };
        assert_eq!(tolerated(json!([])), 2);
        assert_eq!(tolerated(json!([{"key": TAINTS[0], "operator": "Exists", "effect": "NoExecute"}])), 2);
        assert_eq!(tolerated(json!([{"operator": "Exists"}])), 1);
        assert_eq!(tolerated(json!([{"key": TAINTS[0], "effect": "NoSchedule"}])), 3);
    }

    #[test]
    fn a_token_is_mounted_where_nothing_is_mounted() {
        let mut spec = json!({"containers": [{"name": "a"}, {"name": "b",
            "volumeMounts": [{"name": "own", "mountPath": TOKEN_PATH}]}]});
        mount_token(spec.as_object_mut().unwrap());
        assert_eq!(spec["volumes"].as_array().unwrap().len(), 1);
        assert_eq!(spec["containers"][0]["volumeMounts"][0]["name"], spec["volumes"][0]["name"]);
        assert_eq!(spec["containers"][1]["volumeMounts"].as_array().unwrap().len(), 1);
        let before = spec.clone();
        mount_token(spec.as_object_mut().unwrap());
        assert_eq!(spec, before);
    }
}
