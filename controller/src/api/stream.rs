//! The stream of orders: server-sent events, the whole orders on connect and on every change.

use axum::extract::State;
use axum::response::sse::{Event, KeepAlive, Sse};
use flexcomm_domain::NodeName;
use futures_util::{Stream, StreamExt};
use std::convert::Infallible;
use std::future::ready;
use std::sync::Arc;
use tokio::sync::watch;
use tokio_stream::wrappers::WatchStream;

use super::problem::{ApiError, Path};
use super::{Shared, network};
use crate::app::App;
use crate::limits::{MAX_STREAMS, STREAM_PING};
use crate::publish::{Published, publish};

type Newest = watch::Receiver<Option<Arc<Published>>>;

/// Publishes what the store says now and follows the node; 404 for one that never registered.
pub(super) async fn follow(app: &App, node: &NodeName) -> Result<Newest, ApiError> {
    network::known(app, node).await?;
    publish(app).await?;
    Ok(app.publisher.follow(node))
}

/// Ends when the node is forgotten or the controller ends.
pub(super) async fn orders(
    State(app): Shared,
    Path(node): Path<NodeName>,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>>>, ApiError> {
    let newest = follow(&app, &node).await?;
    let permit = app.streams.clone().try_acquire_owned();
    let permit = permit.map_err(|_| ApiError::Unavailable(format!("{MAX_STREAMS} streams are open")))?;
    let event = |newest: Option<Arc<Published>>| {
        ready(newest.map(|published| Ok(Event::default().event("orders").data(&published.json))))
    };
    let mut stopping = app.stopping.subscribe();
    let stopped = async move { drop(stopping.wait_for(|stop| *stop).await) };
    let events = WatchStream::new(newest).filter_map(event).take_until(stopped);
    // The stream holds its permit until it is dropped.
    let stream = events.map(move |event| (event, &permit).0);
    Ok(Sse::new(stream).keep_alive(KeepAlive::new().interval(STREAM_PING).text("ping")))
}
