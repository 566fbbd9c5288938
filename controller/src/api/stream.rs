//! The stream of orders: server-sent events, the whole orders on connect and on every change.

use axum::extract::State;
use axum::response::sse::{Event, KeepAlive, Sse};
use flexcomm_domain::NodeName;
use futures_util::Stream;
use std::convert::Infallible;
use std::sync::Arc;
use tokio::sync::watch;

use super::problem::{ApiError, Path};
use crate::app::App;
use crate::limits::{MAX_STREAMS, STREAM_PING};
use crate::publish::Published;

type Newest = watch::Receiver<Option<Arc<Published>>>;

/// Publishes what the store says now and follows the node; 404 for one that never registered.
pub(super) async fn follow(app: &App, node: &NodeName) -> Result<Newest, ApiError> {
    if app.store.node(node).await?.is_none() {
        return Err(ApiError::NotFound(format!("node {node} never registered")));
    }
    super::agents::fresh(app).await?;
    Ok(app.publisher.follow(node))
}

struct Follower {
    app: Arc<App>,
    orders: Newest,
    stopping: watch::Receiver<bool>,
    first: bool,
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.app.streams.add_permits(1);
    }
}

pub(super) async fn orders(
    State(app): State<Arc<App>>,
    Path(node): Path<NodeName>,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>>>, ApiError> {
    let newest = follow(&app, &node).await?;
    let permit = app.streams.try_acquire();
    let permit = permit.map_err(|_| ApiError::Unavailable(format!("{MAX_STREAMS} streams are open")))?;
    // Given back when the follower is dropped.
    permit.forget();
    let stopping = app.stopping.subscribe();
    let follower = Follower { app: app.clone(), orders: newest, stopping, first: true };
    let stream = futures_util::stream::unfold(follower, |mut f| async move { next(&mut f).await.map(|e| (Ok(e), f)) });
    Ok(Sse::new(stream).keep_alive(KeepAlive::new().interval(STREAM_PING).text("ping")))
}

/// The next orders; `None` when the node is forgotten or the controller ends.
async fn next(f: &mut Follower) -> Option<Event> {
    loop {
        if !std::mem::take(&mut f.first) {
            tokio::select! {
                changed = f.orders.changed() => changed.ok()?,
                _ = f.stopping.changed() => return None,
            }
        }
        let newest = f.orders.borrow_and_update().clone();
        if let Some(published) = newest {
            return Some(Event::default().event("orders").data(&published.json));
        }
    }
}
