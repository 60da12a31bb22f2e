//! Ensures the image of a container before its start: looked up, pulled or refused, with upstream's reasons and events
//! (`kubelet/images/image_manager.go`).

use std::time::Duration;

use mayfly_api::env::EnvSources as _;
use mayfly_api::k8s::api::core::v1::{Container, Pod, Secret};
use mayfly_runtime::{ImageRecord, ImageStore, PullPolicy, PullSecret, Runtime, RuntimeError};
use tokio::time::Instant;

use super::{
    local::{LocalPod, UsedImage},
    options::pull_policy,
    worker::Worker,
};

/// Secrets that hold Docker's configuration, and the key of each.
const SECRET_TYPES: [(&str, &str); 2] =
    [("kubernetes.io/dockerconfigjson", ".dockerconfigjson"), ("kubernetes.io/dockercfg", ".dockercfg")];

/// The action for an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ImageStep {
    Use,
    Pull,
    Refuse,
}

/// Upstream's `shouldPullImage`.
fn image_step(policy: PullPolicy, is_present: bool) -> ImageStep {
    match (policy, is_present) {
        (PullPolicy::Always, _) | (PullPolicy::IfNotPresent, false) => ImageStep::Pull,
        (PullPolicy::IfNotPresent | PullPolicy::Never, true) => ImageStep::Use,
        (PullPolicy::Never, false) => ImageStep::Refuse,
    }
}

impl Worker {
    /// Ensures that the container's image is present. Returns `false` if it is not, and the container waits (or the pod
    /// is deleted).
    pub(super) async fn ensure_image(
        &self,
        spec: &Container,
        pod: &Pod,
        local: &mut LocalPod,
        runtime: &dyn Runtime,
    ) -> bool {
        let image = spec.image.as_deref().unwrap_or_default();
        let Some(images) = runtime.images() else {
            let used = UsedImage { reference: image.to_owned(), id: image.to_owned() };
            local.containers.entry(spec.name.clone()).or_default().image = Some(used);
            return true;
        };
        let present = match images.find(image).await {
            Ok(present) => present,
            Err(error) => {
                self.image_unusable(spec, pod, local, image, &error);
                return false;
            }
        };
        match image_step(pull_policy(spec), present.is_some()) {
            ImageStep::Use => {
                local.containers.entry(spec.name.clone()).or_default().image = present.map(used_image);
                let message = format!("Container image {image:?} already present on machine");
                self.events.normal(pod, "Pulled", message);
                true
            }
            ImageStep::Refuse => {
                let message = format!("Container image {image:?} is not present with pull policy of Never");
                self.events.warning(pod, "ErrImageNeverPull", message.clone());
                self.events.warning(pod, "Failed", "Error: ErrImageNeverPull");
                let container = local.containers.entry(spec.name.clone()).or_default();
                container.start_failed("ErrImageNeverPull", message, Instant::now());
                false
            }
            ImageStep::Pull => self.pull_image(spec, pod, local, images, image).await,
        }
    }

    async fn pull_image(
        &self,
        spec: &Container,
        pod: &Pod,
        local: &mut LocalPod,
        images: &dyn ImageStore,
        image: &str,
    ) -> bool {
        self.events.normal(pod, "Pulling", format!("Pulling image {image:?}"));
        let began = Instant::now();
        let secrets = self.pull_secrets(pod).await;
        let pulled = self.with_progress_status(pod, local, images.pull(image, &secrets));
        match self.unless_deleted(pod, pulled).await {
            None => false,
            Some(Ok(record)) => {
                let took = mayfly_api::duration::Span(Duration::from_millis(
                    u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX),
                ));
                let message = format!(
                    "Successfully pulled image {image:?} in {took} ({took} including waiting). Image size: {} bytes.",
                    record.bytes
                );
                self.events.normal(pod, "Pulled", message);
                local.containers.entry(spec.name.clone()).or_default().image = Some(used_image(record));
                true
            }
            Some(Err(RuntimeError::ImageMissing(why) | RuntimeError::Invalid(why))) => {
                self.pull_failed(spec, pod, local, &why, true);
                false
            }
            Some(Err(error)) => {
                self.pull_failed(spec, pod, local, &error.to_string(), true);
                false
            }
        }
    }

    /// Reports upstream's messages: the first failure is an error, the pause after it a back-off. `is_remote`: the
    /// image comes from a registry, which is retried less often than this node's own store.
    pub(super) fn pull_failed(
        &self,
        spec: &Container,
        pod: &Pod,
        local: &mut LocalPod,
        why: &str,
        is_remote: bool,
    ) {
        let image = spec.image.as_deref().unwrap_or_default();
        let container = local.containers.entry(spec.name.clone()).or_default();
        self.events.warning(pod, "Failed", format!("Failed to pull image {image:?}: {why}"));
        if container.pull_failed(image, why, is_remote, Instant::now()) {
            self.events.normal(pod, "BackOff", format!("Back-off pulling image {image:?}"));
            self.events.warning(pod, "Failed", "Error: ImagePullBackOff");
        } else {
            self.events.warning(pod, "Failed", "Error: ErrImagePull");
        }
    }

    fn image_unusable(
        &self,
        spec: &Container,
        pod: &Pod,
        local: &mut LocalPod,
        image: &str,
        error: &RuntimeError,
    ) {
        let (reason, message) = match error {
            RuntimeError::ImageName(why) => {
                ("InvalidImageName", format!("Failed to apply default image tag {image:?}: {why}"))
            }
            error => ("ImageInspectError", format!("Failed to inspect image {image:?}: {error}")),
        };
        self.events.warning(pod, "InspectFailed", message.clone());
        self.events.warning(pod, "Failed", format!("Error: {reason}"));
        let container = local.containers.entry(spec.name.clone()).or_default();
        container.start_failed(reason, message, Instant::now());
    }

    /// The credentials in `spec.imagePullSecrets` (admission has added those of the service account). A missing Secret
    /// is reported and skipped, as in upstream.
    async fn pull_secrets(&self, pod: &Pod) -> Vec<PullSecret> {
        let names = pod.spec.iter().flat_map(|spec| spec.image_pull_secrets.iter().flatten());
        let names: Vec<&str> = names.map(|reference| reference.name.as_str()).collect();
        if names.is_empty() {
            return Vec::new();
        }
        self.sources.follow().await;
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let mut secrets = Vec::new();
        let mut unusable = Vec::new();
        for name in names {
            match self.sources.secret(namespace, name).as_deref().and_then(docker_config) {
                Some(secret) => secrets.push(secret),
                None => unusable.push(name),
            }
        }
        if !unusable.is_empty() {
            let message = format!(
                "Unable to retrieve some image pull secrets ({}); attempting to pull the image may not succeed.",
                unusable.join(", ")
            );
            self.events.warning(pod, "FailedToRetrieveImagePullSecret", message);
        }
        secrets
    }
}

fn used_image(record: ImageRecord) -> UsedImage {
    let ImageRecord { reference, id, digest, .. } = record;
    UsedImage { reference, id: if id.is_empty() { digest } else { id } }
}

/// A Secret's Docker configuration; the older type is not wrapped in `auths`.
fn docker_config(secret: &Secret) -> Option<PullSecret> {
    let kind = secret.type_.as_deref().unwrap_or_default();
    let (_, key) = SECRET_TYPES.iter().find(|(known, _)| *known == kind)?;
    let text = secret.data.as_ref()?.get(*key)?.0.clone();
    if *key == ".dockerconfigjson" {
        return Some(PullSecret(text));
    }
    let auths: serde_json::Value = serde_json::from_slice(&text).ok()?;
    Some(PullSecret(serde_json::to_vec(&serde_json::json!({"auths": auths})).ok()?))
}

#[cfg(test)]
mod tests {
    use base64::{Engine as _, engine::general_purpose::STANDARD};
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn upstreams_table_of_policies() {
        for (policy, present, step) in [
            (PullPolicy::Always, true, ImageStep::Pull),
            (PullPolicy::Always, false, ImageStep::Pull),
            (PullPolicy::IfNotPresent, true, ImageStep::Use),
            (PullPolicy::IfNotPresent, false, ImageStep::Pull),
            (PullPolicy::Never, true, ImageStep::Use),
            (PullPolicy::Never, false, ImageStep::Refuse),
        ] {
            assert_eq!(image_step(policy, present), step, "{policy:?} {present}");
        }
    }

    #[test]
    fn both_kinds_of_secrets_become_one() {
        let secret = |kind: &str, key: &str, text: &Value| -> Secret {
            let data = json!({key: STANDARD.encode(text.to_string())});
            serde_json::from_value(json!({"type": kind, "data": data})).unwrap()
        };
        let auths = json!({"r.example.com": {"auth": "x"}});
        let wrapped = json!({"auths": auths});
        let config = secret("kubernetes.io/dockerconfigjson", ".dockerconfigjson", &wrapped);
        let old = secret("kubernetes.io/dockercfg", ".dockercfg", &auths);
        for secret in [&config, &old] {
            let text = docker_config(secret).unwrap().0;
            assert_eq!(serde_json::from_slice::<Value>(&text).unwrap(), wrapped);
        }
        assert_eq!(docker_config(&secret("Opaque", ".dockerconfigjson", &wrapped)), None);
        assert_eq!(docker_config(&secret("kubernetes.io/dockerconfigjson", "other", &wrapped)), None);
    }
}
