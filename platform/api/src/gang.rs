//! Gangs: pods of one controller that are placed together or not at all.
//!
//! The annotation [`ANNOTATION_GANG`] of a Job or of its pod template is a number of pods, or `all`: as many as run at
//! the same time. The job controller writes the number on each pod, where the scheduler reads it. A pod template of
//! another controller names the number itself.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use crate::{
    duration::Span,
    k8s::api::{batch::v1::Job, core::v1::Pod},
};

/// On a Job, a pod template or a pod: how many pods are placed together; on a Job also `all`.
pub const ANNOTATION_GANG: &str = "mayfly.dev/gang";
/// Beside [`ANNOTATION_GANG`]: how long a gang may hold nodes while it is incomplete. See [`GANG_TIMEOUT_DEFAULT`].
pub const ANNOTATION_GANG_TIMEOUT: &str = "mayfly.dev/gang-timeout";
/// Long enough to create and place a replacement of a pod, and short compared to the duration of a job.
pub const GANG_TIMEOUT_DEFAULT: Duration = Duration::from_secs(300);
/// The scheduler plans a gang at once, so that its size is bounded.
pub const GANG_SIZE_MAX: u32 = 1024;

const ALL: &str = "all";

/// The gang of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gang {
    pub key: GangKey,
    /// The number of pods that are placed together. More pods than that are placed one by one.
    pub size: u32,
    pub timeout: Duration,
}

/// The identity of a gang: the controller that its pods have in common.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GangKey {
    pub namespace: Arc<str>,
    pub controller_uid: Arc<str>,
}

type Annotations = BTreeMap<String, String>;

impl Gang {
    /// The gang of a pod; `None` where it has none.
    ///
    /// # Errors
    /// The problem of the annotations, as a message for the pod's owner.
    pub fn of(pod: &Pod) -> Result<Option<Self>, String> {
        let Some(annotations) = &pod.metadata.annotations else { return Ok(None) };
        let Some(text) = annotations.get(ANNOTATION_GANG) else { return Ok(None) };
        let size = size(text)?;
        let owners = pod.metadata.owner_references.iter().flatten();
        let controller = owners.into_iter().find(|owner| owner.controller == Some(true));
        let Some(controller) = controller else {
            return Err(format!(
                "a pod with the annotation {ANNOTATION_GANG} needs a controller, such as a Job"
            ));
        };
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default().into();
        let key = GangKey { namespace, controller_uid: controller.uid.as_str().into() };
        Ok(Some(Self { key, size, timeout: timeout(annotations)? }))
    }
}

fn size(text: &str) -> Result<u32, String> {
    let size = text.parse().ok().filter(|size| (1..=GANG_SIZE_MAX).contains(size));
    size.ok_or_else(|| {
        format!(
            "the annotation {ANNOTATION_GANG} is {text:?}, not a number of pods from 1 to {GANG_SIZE_MAX}"
        )
    })
}

fn timeout(annotations: &Annotations) -> Result<Duration, String> {
    let Some(text) = annotations.get(ANNOTATION_GANG_TIMEOUT) else { return Ok(GANG_TIMEOUT_DEFAULT) };
    let span: Result<Span, _> = text.parse();
    // A timeout of zero would release a gang between two bindings.
    span.map(|span| span.0.max(Duration::from_secs(1))).map_err(|_| {
        format!("the annotation {ANNOTATION_GANG_TIMEOUT} is {text:?}, not a duration such as 5m")
    })
}

/// The annotations that the pods of a Job get, so that each names its gang.
pub fn annotations_of_job_pods(job: &Job) -> Annotations {
    let Some(spec) = &job.spec else { return Annotations::new() };
    let template = spec.template.metadata.as_ref().and_then(|metadata| metadata.annotations.as_ref());
    let own = job.metadata.annotations.as_ref();
    let find =
        |name: &str| template.and_then(|all| all.get(name)).or_else(|| own.and_then(|all| all.get(name)));
    let Some(size) = find(ANNOTATION_GANG) else { return Annotations::new() };
    let size = if size == ALL { pods_at_once(job).to_string() } else { size.clone() };
    let timeout =
        find(ANNOTATION_GANG_TIMEOUT).map(|text| (ANNOTATION_GANG_TIMEOUT.to_owned(), text.clone()));
    std::iter::once((ANNOTATION_GANG.to_owned(), size)).chain(timeout).collect()
}

/// The maximum number of pods of a Job that run at the same time.
pub fn pods_at_once(job: &Job) -> u32 {
    let Some(spec) = &job.spec else { return 0 };
    let parallelism = spec.parallelism.unwrap_or(1);
    let pods = spec.completions.map_or(parallelism, |completions| parallelism.min(completions));
    u32::try_from(pods).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(annotations: serde_json::Value, controlled: bool) -> Pod {
        let owner = json!({"apiVersion": "batch/v1", "kind": "Job", "name": "j", "uid": "u", "controller": controlled});
        let metadata = json!({"namespace": "n", "annotations": annotations, "ownerReferences": [owner]});
        serde_json::from_value(json!({"metadata": metadata})).unwrap()
    }

    #[test]
    fn a_pod_names_its_gang() {
        let gang = Gang::of(&pod(json!({"mayfly.dev/gang": "4", "mayfly.dev/gang-timeout": "30s"}), true));
        let key = GangKey { namespace: "n".into(), controller_uid: "u".into() };
        assert_eq!(gang, Ok(Some(Gang { key, size: 4, timeout: Duration::from_secs(30) })));
        assert_eq!(Gang::of(&pod(json!({}), true)), Ok(None));
        for (annotations, controlled, expected) in [
            (json!({"mayfly.dev/gang": "4"}), false, "needs a controller"),
            (json!({"mayfly.dev/gang": "0"}), true, "from 1 to 1024"),
            (json!({"mayfly.dev/gang": "all"}), true, "from 1 to 1024"),
            (
                json!({"mayfly.dev/gang": "4", "mayfly.dev/gang-timeout": "soon"}),
                true,
                "a duration such as 5m",
            ),
        ] {
            let error = Gang::of(&pod(annotations, controlled)).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn the_pods_of_a_job_get_the_number() {
        let job = |annotations, template, parallelism: i32| {
            let spec = json!({"parallelism": parallelism, "completions": 8,
                "template": {"metadata": {"annotations": template}}});
            let job: Job =
                serde_json::from_value(json!({"metadata": {"annotations": annotations}, "spec": spec}))
                    .unwrap();
            annotations_of_job_pods(&job).get(ANNOTATION_GANG).cloned()
        };
        let none = || json!({});
        assert_eq!(job(json!({"mayfly.dev/gang": "all"}), none(), 4).as_deref(), Some("4"));
        assert_eq!(job(json!({"mayfly.dev/gang": "all"}), none(), 16).as_deref(), Some("8"));
        assert_eq!(job(none(), json!({"mayfly.dev/gang": "all"}), 4).as_deref(), Some("4"));
        assert_eq!(
            job(json!({"mayfly.dev/gang": "2"}), json!({"mayfly.dev/gang": "3"}), 4).as_deref(),
            Some("3")
        );
        assert_eq!(job(none(), none(), 4), None);
    }
}
