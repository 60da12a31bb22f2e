//! The image registry of this process at its admin address, and the client that pulls from it.

use std::net::SocketAddr;

use anyhow::Context as _;
use mayfly_cli::data_dir::DataDir;
use mayfly_distribution::{BuiltinRegistry, RegistryClient, RegistryLogin};
use mayfly_registry::{RegistryAccess, RegistryServer};

use crate::image_config::ImageSettings;

/// The registry, and the client for it and all other registries. On an address that other machines can reach, the token
/// of the kubeconfig is the password; on a loopback address there is no authentication, as docker and oras expect
/// there.
pub(super) fn create(
    settings: &ImageSettings,
    data_dir: &DataDir,
    admin: SocketAddr,
    token: &str,
) -> anyhow::Result<(RegistryServer, RegistryClient)> {
    let access = match admin.ip().is_loopback() {
        true => RegistryAccess::Anyone,
        false => RegistryAccess::Token(token.to_owned()),
    };
    let server = RegistryServer::create(&data_dir.registry(), access)
        .with_context(|| format!("cannot open the registry in {}", data_dir.registry().display()))?;
    let mut config = settings.registries()?;
    let mut address = admin;
    if admin.ip().is_unspecified() {
        address.set_ip(std::net::Ipv4Addr::LOCALHOST.into());
    }
    let login =
        RegistryLogin { username: "mayfly".into(), password: token.to_owned(), ..RegistryLogin::default() };
    config.set_builtin(BuiltinRegistry { url: format!("http://{address}"), login });
    Ok((server, RegistryClient::new(config)))
}
