//! A forwarder with one foot in each network: it listens on the host's loopback and connects inside.

use anyhow::{Result, anyhow, ensure};
use std::net::{SocketAddr, TcpListener};

/// Most connections carried at once: a browser and a few tools.
const MAX_CONNECTIONS: usize = 64;

/// Binds on the host. Call before the thread enters the inside's namespace.
pub(crate) fn bind(listen: SocketAddr) -> Result<TcpListener> {
    ensure!(
        listen.ip().is_loopback(),
        "--listen {listen}: the lab is for this machine only, choose a loopback address such as 127.0.0.1:7070"
    );
    let bound = TcpListener::bind(listen).and_then(|listener| listener.set_nonblocking(true).map(|()| listener));
    bound.map_err(|why| anyhow!("cannot listen on {listen}: {why}; choose another with --listen"))
}

/// Carries connections from `listener` to `target` for ever. The calling thread must be in the namespace
/// where `target` is reachable, and must drive the returned future itself.
pub(crate) async fn carry(listener: TcpListener, target: SocketAddr) -> std::io::Result<()> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let slots = std::sync::Arc::new(tokio::sync::Semaphore::new(MAX_CONNECTIONS));
    loop {
        let (mut outer, _) = listener.accept().await?;
        let Ok(slot) = slots.clone().try_acquire_owned() else { continue };
        tokio::task::spawn_local(async move {
            let _slot = slot;
            match tokio::net::TcpStream::connect(target).await {
                Ok(mut inner) => {
                    if let Err(error) = tokio::io::copy_bidirectional(&mut outer, &mut inner).await {
                        tracing::debug!(%error, "a forwarded connection ended");
                    }
                }
                Err(error) => tracing::debug!(%error, %target, "nothing answers inside yet"),
            }
        });
    }
}
