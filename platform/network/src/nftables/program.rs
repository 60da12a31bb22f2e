//! Runs the program `nft`.

use std::{process::Stdio, time::Duration};

use tokio::{io::AsyncWriteExt as _, process::Command};

/// The timeout of one transaction of `nft`.
const NFT_TIMEOUT: Duration = Duration::from_secs(60);

/// The reason why rules could not be written.
#[derive(Debug, thiserror::Error)]
pub enum NftError {
    #[error("the program nft cannot be run: {0}; install nftables, or use --network loopback")]
    Start(#[source] std::io::Error),
    #[error("nft did not end within {}s", NFT_TIMEOUT.as_secs())]
    Timeout,
    #[error("nft refused the rules: {0}")]
    Refused(String),
}

/// Executes a transaction.
pub(crate) async fn run_nft(script: &str) -> Result<(), NftError> {
    run_nft_with(&["-f", "-"], script).await.map(|_| ())
}

/// Runs `nft`; returns its output.
pub(crate) async fn run_nft_with(arguments: &[&str], input: &str) -> Result<String, NftError> {
    let mut nft = Command::new("nft");
    nft.args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    let running = async {
        let mut nft = nft.spawn().map_err(NftError::Start)?;
        if let Some(mut stdin) = nft.stdin.take() {
            // A write error means that the program ended early; it reports the reason on stderr.
            let _ = stdin.write_all(input.as_bytes()).await;
        }
        nft.wait_with_output().await.map_err(NftError::Start)
    };
    let output = tokio::time::timeout(NFT_TIMEOUT, running).await.map_err(|_| NftError::Timeout)??;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(NftError::Refused(said.lines().take(5).collect::<Vec<_>>().join("; ")))
}
