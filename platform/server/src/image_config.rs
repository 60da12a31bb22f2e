//! Settings of images: registries, and the removal of unused images from a node.

use std::{path::PathBuf, time::Duration};

use anyhow::Context as _;
use clap::Args;
use mayfly_distribution::RegistryConfig;
use mayfly_kubelet::ImageCollection;
use serde::Deserialize;

use crate::config::time_span;

/// Flags of `mayfly up` for images.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct ImageOptions {
    /// Mirrors, credentials and certificates of registries: a file in the format of k3s's registries.yaml
    #[arg(long, env = "MAYFLY_REGISTRY_CONFIG", value_name = "FILE")]
    registry_config: Option<PathBuf>,
    /// Use no TLS for this registry (as for those on this machine); may be given several times
    #[arg(long, env = "MAYFLY_INSECURE_REGISTRY", value_name = "HOST[:PORT]", value_delimiter = ',')]
    insecure_registry: Vec<String>,
    /// Start removing unused images when disk usage reaches this, in percent [default: 85]
    #[arg(long, env = "MAYFLY_IMAGE_GC_HIGH_THRESHOLD", value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(0..=100))]
    image_gc_high_threshold: Option<u8>,
    /// Stop removing unused images when disk usage is down to this, in percent [default: 80]
    #[arg(long, env = "MAYFLY_IMAGE_GC_LOW_THRESHOLD", value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(0..=100))]
    image_gc_low_threshold: Option<u8>,
    /// Remove images that no pod has used for this long, such as 168h [default: never because of their age alone]
    #[arg(long, env = "MAYFLY_IMAGE_MAXIMUM_GC_AGE", value_name = "TIME")]
    image_maximum_gc_age: Option<String>,
}

/// The same settings in the config file.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub(crate) struct ImageFile {
    registry_config: Option<PathBuf>,
    insecure_registry: Vec<String>,
    gc_high_threshold: Option<u8>,
    gc_low_threshold: Option<u8>,
    maximum_gc_age: Option<String>,
}

/// The parsed settings; files are not read yet.
#[derive(Clone, Debug, Default)]
pub(crate) struct ImageSettings {
    registry_config: Option<PathBuf>,
    insecure_registries: Vec<String>,
    pub(crate) collection: ImageCollection,
}

impl ImageOptions {
    pub(crate) fn resolve(self, file: ImageFile) -> anyhow::Result<ImageSettings> {
        let defaults = ImageCollection::default();
        let collection = ImageCollection {
            high_percent: self
                .image_gc_high_threshold
                .or(file.gc_high_threshold)
                .unwrap_or(defaults.high_percent),
            low_percent: self
                .image_gc_low_threshold
                .or(file.gc_low_threshold)
                .unwrap_or(defaults.low_percent),
            max_age: self
                .image_maximum_gc_age
                .or(file.maximum_gc_age)
                .map(|text| time_span("image-maximum-gc-age", &text))
                .transpose()?
                .filter(|age: &Duration| !age.is_zero()),
            ..defaults
        };
        anyhow::ensure!(
            collection.high_percent <= 100 && collection.low_percent <= collection.high_percent,
            "--image-gc-low-threshold {} and --image-gc-high-threshold {}: the low one must not be above the high one, \
             which is 100 at most",
            collection.low_percent,
            collection.high_percent
        );
        let insecure = match self.insecure_registry.is_empty() {
            true => file.insecure_registry,
            false => self.insecure_registry,
        };
        Ok(ImageSettings {
            registry_config: self.registry_config.or(file.registry_config),
            insecure_registries: insecure.into_iter().filter(|host| !host.is_empty()).collect(),
            collection,
        })
    }
}

impl ImageSettings {
    /// Reads the registries file, if there is one.
    pub(crate) fn registries(&self) -> anyhow::Result<RegistryConfig> {
        let mut config = match &self.registry_config {
            Some(path) => RegistryConfig::read(path).context("--registry-config")?,
            None => RegistryConfig::default(),
        };
        for host in &self.insecure_registries {
            anyhow::ensure!(
                !host.contains('/'),
                "--insecure-registry {host}: name a host, and a port if it is not 80, such as registry.local:5000"
            );
            config.allow_plain_http(host);
        }
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thresholds_are_in_order_and_flags_are_stronger() {
        let args = |high, low| ImageOptions {
            image_gc_high_threshold: high,
            image_gc_low_threshold: low,
            ..ImageOptions::default()
        };
        let file = ImageFile {
            gc_high_threshold: Some(60),
            maximum_gc_age: Some("168h".into()),
            ..Default::default()
        };
        let error = args(None, None).resolve(file.clone()).unwrap_err().to_string();
        assert!(error.contains("--image-gc-low-threshold 80"), "{error}");
        let set = args(Some(90), Some(50)).resolve(file).unwrap().collection;
        assert_eq!((set.high_percent, set.low_percent), (90, 50));
        assert_eq!(set.max_age, Some(Duration::from_secs(168 * 3600)));
        assert_eq!(args(None, None).resolve(ImageFile::default()).unwrap().collection.max_age, None);
    }

    #[test]
    fn registries_are_named_by_host() {
        let settings = |host: &str| {
            let args = ImageOptions { insecure_registry: vec![host.into()], ..ImageOptions::default() };
            args.resolve(ImageFile::default()).unwrap().registries()
        };
        assert!(settings("r.example.com:5000").is_ok());
        assert!(settings("http://r.example.com").unwrap_err().to_string().contains("name a host"));
        let file =
            ImageOptions { registry_config: Some("/nowhere/r.yaml".into()), ..ImageOptions::default() };
        let error = file.resolve(ImageFile::default()).unwrap().registries().unwrap_err();
        assert!(format!("{error:#}").contains("--registry-config: /nowhere/r.yaml"), "{error:#}");
    }
}
