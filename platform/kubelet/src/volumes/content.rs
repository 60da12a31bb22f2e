//! The files of volumes that are generated from objects and from the pod: configMap, secret, downwardAPI, projected.

use mayfly_api::{
    ObjectKey,
    env::EnvSources,
    k8s::api::core::v1::{DownwardAPIVolumeFile, KeyToPath, Pod, ProjectedVolumeSource, Volume},
};

use super::{
    VolumeSources,
    files::{VolumeFile, VolumeFiles},
    tokens::TokenUse,
};
use crate::pod::fields;

/// The default mode of files (upstream's).
const MODE_DEFAULT: i32 = 0o644;

/// The source of a volume whose files the kubelet writes.
pub(super) enum FileSource<'a> {
    ConfigMap { name: &'a str, items: Option<&'a [KeyToPath]>, optional: bool, mode: i32 },
    Secret { name: &'a str, items: Option<&'a [KeyToPath]>, optional: bool, mode: i32 },
    Downward { items: &'a [DownwardAPIVolumeFile], mode: i32 },
    Projected(&'a ProjectedVolumeSource),
}

impl<'a> FileSource<'a> {
    pub(super) fn of(volume: &'a Volume) -> Option<Self> {
        if let Some(source) = &volume.config_map {
            return Some(Self::ConfigMap {
                name: &source.name,
                items: source.items.as_deref(),
                optional: source.optional.unwrap_or(false),
                mode: source.default_mode.unwrap_or(MODE_DEFAULT),
            });
        }
        if let Some(source) = &volume.secret {
            return Some(Self::Secret {
                name: source.secret_name.as_deref().unwrap_or_default(),
                items: source.items.as_deref(),
                optional: source.optional.unwrap_or(false),
                mode: source.default_mode.unwrap_or(MODE_DEFAULT),
            });
        }
        if let Some(source) = &volume.downward_api {
            return Some(Self::Downward {
                items: source.items.as_deref().unwrap_or_default(),
                mode: source.default_mode.unwrap_or(MODE_DEFAULT),
            });
        }
        volume.projected.as_ref().map(Self::Projected)
    }

    /// Whether the files are kept off the disk (as upstream: all but those of ConfigMaps).
    pub(super) fn is_private(&self) -> bool {
        match self {
            Self::ConfigMap { .. } => false,
            Self::Secret { .. } | Self::Downward { .. } | Self::Projected(_) => true,
        }
    }

    /// The current files of the volume.
    pub(super) fn files(
        &self,
        pod: &Pod,
        sources: &VolumeSources<'_, impl EnvSources>,
    ) -> Result<VolumeFiles, String> {
        let namespace = ObjectKey::of(pod).namespace;
        match self {
            Self::ConfigMap { name, items, optional, mode } => {
                let Some(map) = sources.objects.config_map(&namespace, name) else {
                    return absent("configmap", name, *optional);
                };
                let text =
                    map.data.iter().flatten().map(|(key, value)| (key.clone(), value.clone().into_bytes()));
                let binary =
                    map.binary_data.iter().flatten().map(|(key, value)| (key.clone(), value.0.clone()));
                chosen("config", text.chain(binary).collect(), *items, *optional, *mode)
            }
            Self::Secret { name, items, optional, mode } => {
                let Some(secret) = sources.objects.secret(&namespace, name) else {
                    return absent("secret", name, *optional);
                };
                let data = secret.data.iter().flatten().map(|(key, value)| (key.clone(), value.0.clone()));
                chosen("secret", data.collect(), *items, *optional, *mode)
            }
            Self::Downward { items, mode } => downward(items, *mode, pod, sources),
            Self::Projected(projected) => {
                let mode = projected.default_mode.unwrap_or(MODE_DEFAULT);
                let mut files = VolumeFiles::new();
                for source in projected.sources.iter().flatten() {
                    files.extend(projection(source, mode, pod, sources)?);
                }
                Ok(files)
            }
        }
    }
}

fn projection(
    source: &mayfly_api::k8s::api::core::v1::VolumeProjection,
    mode: i32,
    pod: &Pod,
    sources: &VolumeSources<'_, impl EnvSources>,
) -> Result<VolumeFiles, String> {
    let one = if let Some(map) = &source.config_map {
        let optional = map.optional.unwrap_or(false);
        FileSource::ConfigMap { name: &map.name, items: map.items.as_deref(), optional, mode }
    } else if let Some(secret) = &source.secret {
        let optional = secret.optional.unwrap_or(false);
        FileSource::Secret { name: &secret.name, items: secret.items.as_deref(), optional, mode }
    } else if let Some(downward) = &source.downward_api {
        FileSource::Downward { items: downward.items.as_deref().unwrap_or_default(), mode }
    } else if let Some(token) = &source.service_account_token {
        let text = sources.tokens.get(&TokenUse::of(token)).ok_or("the service account has no token")?;
        let file = VolumeFile { content: text.clone().into_bytes(), mode: permissions(mode) };
        return Ok([(token.path.clone(), file)].into());
    } else {
        return Err("this node does not support clusterTrustBundle".into());
    };
    one.files(pod, sources)
}

fn absent(kind: &str, name: &str, optional: bool) -> Result<VolumeFiles, String> {
    match optional {
        true => Ok(VolumeFiles::new()),
        false => Err(format!("{kind} {name:?} not found")),
    }
}

/// All keys, or the named ones. `kind`: upstream's word for them in messages.
fn chosen(
    kind: &str,
    data: std::collections::BTreeMap<String, Vec<u8>>,
    items: Option<&[KeyToPath]>,
    optional: bool,
    mode: i32,
) -> Result<VolumeFiles, String> {
    let file = |content: Vec<u8>, mode: i32| VolumeFile { content, mode: permissions(mode) };
    let Some(items) = items.filter(|items| !items.is_empty()) else {
        return Ok(data.into_iter().map(|(key, content)| (key, file(content, mode))).collect());
    };
    let mut files = VolumeFiles::new();
    for item in items {
        match data.get(&item.key) {
            Some(content) => {
                files.insert(item.path.clone(), file(content.clone(), item.mode.unwrap_or(mode)));
            }
            None if optional => {}
            None => return Err(format!("references non-existent {kind} key: {}", item.key)),
        }
    }
    Ok(files)
}

fn downward(
    items: &[DownwardAPIVolumeFile],
    mode: i32,
    pod: &Pod,
    sources: &VolumeSources<'_, impl EnvSources>,
) -> Result<VolumeFiles, String> {
    let mut files = VolumeFiles::new();
    for item in items {
        let text = if let Some(field) = &item.field_ref {
            fields::of_pod(pod, &field.field_path, sources.address.as_slice(), sources.node)
                .ok_or_else(|| format!("the field {:?} is unknown", field.field_path))?
        } else if let Some(resource) = &item.resource_field_ref {
            fields::of_resources(pod, None, resource, sources.node.allocatable)?
        } else {
            continue;
        };
        let mode = permissions(item.mode.unwrap_or(mode));
        files.insert(item.path.clone(), VolumeFile { content: text.into_bytes(), mode });
    }
    Ok(files)
}

fn permissions(mode: i32) -> u32 {
    u32::try_from(mode).unwrap_or(0o644) & 0o777
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::{pod::fields::NodeView, test_objects::FixedObjects};

    fn files(volume: Value) -> Result<Vec<(String, String, u32)>, String> {
        let volume: Volume = serde_json::from_value(volume).unwrap();
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": "p", "namespace": "ns", "labels": {"x": "y"}},
            "spec": {"containers": [{"name": "c", "resources": {"limits": {"memory": "64Mi"}}}]}}))
        .unwrap();
        let token: mayfly_api::k8s::api::core::v1::ServiceAccountTokenProjection =
            serde_json::from_value(json!({"path": "token", "audience": "vault"})).unwrap();
        let tokens = [(TokenUse::of(&token), "secret".to_owned())].into();
        let sources = VolumeSources {
            objects: &FixedObjects::new(
                ("map", json!({"data": {"a": "1", "b": "2"}})),
                ("secret", json!({"data": {"key": "cHc="}})),
            ),
            node: NodeView { name: "n", address: [127, 0, 0, 1].into(), allocatable: &Default::default() },
            address: None,
            tokens: &tokens,
            claimed: &Default::default(),
        };
        let files = FileSource::of(&volume).unwrap().files(&pod, &sources)?;
        let text = |file: VolumeFile| (String::from_utf8(file.content).unwrap(), file.mode);
        Ok(files.into_iter().map(|(path, file)| (path, text(file))).map(|(p, (c, m))| (p, c, m)).collect())
    }

    #[test]
    fn keys_become_files() {
        let all = files(json!({"name": "v", "configMap": {"name": "map", "defaultMode": 0o400}})).unwrap();
        assert_eq!(all, [("a".into(), "1".into(), 0o400), ("b".into(), "2".into(), 0o400)]);
        let some = json!({"name": "v", "configMap": {"name": "map", "items": [{"key": "b", "path": "x/y", "mode": 0o600}]}});
        assert_eq!(files(some).unwrap(), [("x/y".into(), "2".into(), 0o600)]);
        let secret = files(json!({"name": "v", "secret": {"secretName": "secret"}})).unwrap();
        assert_eq!(secret, [("key".into(), "pw".into(), 0o644)]);
    }

    #[test]
    fn what_is_not_there_is_named_unless_it_is_optional() {
        let named =
            |optional: bool| json!({"name": "v", "configMap": {"name": "none", "optional": optional}});
        assert!(files(named(false)).unwrap_err().contains("configmap \"none\" not found"));
        assert_eq!(files(named(true)).unwrap(), []);
        let key = json!({"name": "v", "configMap": {"name": "map", "items": [{"key": "z", "path": "z"}]}});
        assert_eq!(files(key).unwrap_err(), "references non-existent config key: z");
    }

    #[test]
    fn a_token_is_projected_for_its_audience() {
        let volume = |audience: &str| {
            let source = json!({"serviceAccountToken": {"path": "t", "audience": audience}});
            json!({"name": "v", "projected": {"sources": [source]}})
        };
        assert_eq!(files(volume("vault")).unwrap(), [("t".into(), "secret".into(), 0o644)]);
        assert!(files(volume("other")).unwrap_err().contains("no token"));
    }

    #[test]
    fn a_projection_joins_its_sources() {
        let projected = json!({"name": "v", "projected": {"sources": [
            {"configMap": {"name": "map", "items": [{"key": "a", "path": "a"}]}},
            {"secret": {"name": "secret"}},
            {"downwardAPI": {"items": [
                {"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}},
                {"path": "memory", "resourceFieldRef": {"containerName": "c", "resource": "limits.memory", "divisor": "1Mi"}}]}}]}});
        let all = files(projected).unwrap();
        let paths: Vec<_> = all.iter().map(|(path, content, _)| (path.as_str(), content.as_str())).collect();
        assert_eq!(paths, [("a", "1"), ("key", "pw"), ("labels", "x=\"y\""), ("memory", "64")]);
    }
}
