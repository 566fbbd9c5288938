//! What agents call.

use axum::Json;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use flexcomm_domain::{NodeName, Timestamp};
use flexcomm_wire::{
    Heartbeat, MAX_BATCH, MAX_PREVIOUS, MAX_SEQ_STEP, MAX_SOFTWARE, Orders, PROTOCOL, Register, Registered, Report,
    ReportAck, ReportBody,
};
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, SeqAccess, Visitor};
use serde_json::value::RawValue;
use std::fmt;

use super::body::{self, Body};
use super::problem::{ApiError, Path};
use super::{Answer, Shared};
use crate::app::App;
use crate::limits::{MAX_BODY, MAX_INTEGER, MAX_NODES, MAX_REPORT, MAX_TEXT};
use crate::reports::{Reason, Rejected};
use crate::store::{Incoming, Ingest, News, Registration};

fn again(node: &NodeName) -> ApiError {
    ApiError::NotFound(format!("node {node} is not registered by this instance of its agent; register again"))
}

pub(super) async fn register(State(app): Shared, Body(request): Body<Register>) -> Answer<Registered> {
    admit(&app, &request).await.map(Json)
}

/// Registers a node, and wakes the loop.
pub(crate) async fn admit(app: &App, request: &Register) -> Result<Registered, ApiError> {
    check(request)?;
    let now = app.clock.now();
    if let Err(age_s) = app.presence.claim(&request.node, (request.instance, &request.previous), now) {
        return Err(ApiError::Conflict(format!(
            "another agent holds the name {} (heard of {age_s:.1} s ago); give this one another name, or wait until \
             the other is silent for {} s",
            request.node,
            app.config.dead_after.as_secs_f64()
        )));
    }
    match app.store.register(request, now).await {
        Ok(Registration::Done(acked_seq)) => {
            app.wake.notify_one();
            tracing::info!(node = %request.node, addr = %request.addr, acked_seq, "registered");
            let heartbeat_ms = u64::try_from(app.config.heartbeat.as_millis()).unwrap_or(u64::MAX);
            Ok(Registered { heartbeat_ms, acked_seq })
        }
        Ok(Registration::Full) => {
            app.presence.forget(&request.node);
            let remedy = "DELETE /api/v1/nodes/{node} forgets one";
            Err(ApiError::Conflict(format!("there are {MAX_NODES} nodes already; {remedy}")))
        }
        Err(error) => {
            app.presence.forget(&request.node);
            Err(error.into())
        }
    }
}

fn check(request: &Register) -> Result<(), ApiError> {
    let refuse = |detail: String| Err(ApiError::Unprocessable(detail));
    if request.protocol != PROTOCOL {
        return refuse(format!(
            "the agent speaks protocol {}, this controller speaks {PROTOCOL}; run the same version on both",
            request.protocol
        ));
    }
    let length = request.software.chars().count();
    if length > MAX_SOFTWARE {
        return refuse(format!("software has {length} characters, allowed are {MAX_SOFTWARE}"));
    }
    if request.previous.len() > MAX_PREVIOUS {
        return refuse(format!("{} previous instances, allowed are {MAX_PREVIOUS}", request.previous.len()));
    }
    if request.addr.is_unspecified() || request.addr.is_multicast() {
        return refuse(format!("addr is {}, where no peer can reach the node", request.addr));
    }
    Ok(())
}

pub(super) async fn heartbeat(
    State(app): Shared,
    Path(node): Path<NodeName>,
    Body(beat): Body<Heartbeat>,
) -> Result<StatusCode, ApiError> {
    alive(&app, &node, &beat).map(|()| StatusCode::NO_CONTENT)
}

/// Takes note of a heartbeat.
pub(crate) fn alive(app: &App, node: &NodeName, beat: &Heartbeat) -> Result<(), ApiError> {
    if app.presence.heartbeat(node, beat, app.clock.now()) { Ok(()) } else { Err(again(node)) }
}

/// A batch whose reports may be anything: a bad one must not hold up the good ones. Each is read by itself, straight from the
/// body: no tree of values is ever made of it.
#[derive(Deserialize)]
struct LooseBatch<'a> {
    instance: u64,
    #[serde(borrow, deserialize_with = "at_most_a_batch")]
    reports: Vec<&'a RawValue>,
}

/// Reads no more reports than a batch may have: many small ones take more memory than their text.
fn at_most_a_batch<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<&'de RawValue>, D::Error> {
    struct Reports;
    impl<'de> Visitor<'de> for Reports {
        type Value = Vec<&'de RawValue>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "a list of at most {MAX_BATCH} reports")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<Self::Value, A::Error> {
            let mut all = Vec::new();
            while let Some(report) = from.next_element()? {
                if all.len() == MAX_BATCH {
                    return Err(A::Error::custom(format!(
                        "more than {MAX_BATCH} reports, at most {MAX_BATCH} in a batch"
                    )));
                }
                all.push(report);
            }
            Ok(all)
        }
    }
    from.deserialize_seq(Reports)
}

pub(super) async fn reports(State(app): Shared, Path(node): Path<NodeName>, request: Request) -> Answer<ReportAck> {
    let body = body::read(&app, request, MAX_BODY).await?;
    let batch = body.decode(batch).await?;
    take(&app, &node, batch).await.map(Json)
}

/// Reports of one instance of an agent.
pub(crate) struct Batch {
    instance: u64,
    reports: Vec<Incoming>,
}

/// Reads a body of reports. What is wrong with one of them is kept with it.
pub(crate) fn batch(bytes: &[u8]) -> Result<Batch, ApiError> {
    body::json(bytes).and_then(incoming)
}

/// Stores reports, and wakes the loop when they are news.
pub(crate) async fn take(app: &App, node: &NodeName, batch: Batch) -> Result<ReportAck, ApiError> {
    let Batch { instance, reports } = batch;
    let now: Timestamp = app.clock.now();
    if !app.presence.saw(node, instance, now) {
        return Err(again(node));
    }
    let live = app.presence.live(now);
    let done = match app.store.ingest((node, instance), reports, &live, now).await? {
        Ingest::Done(done) => done,
        Ingest::Stranger => return Err(again(node)),
        Ingest::Jump { from, to } => {
            return Err(ApiError::Unprocessable(format!(
                "seq jumps from {from} to {to}: the next is at most {MAX_SEQ_STEP} higher; nothing was stored"
            )));
        }
    };
    let mut wakes = false;
    for news in &done.news {
        wakes |= match news {
            News::GrantDone(spent) => {
                app.scheduler.lock().finished(node, spent, now);
                true
            }
            News::Job => true,
            News::Steps { job, rank, steps, last } => app.reported.lock().note(job, *rank, (*steps, *last)),
        };
    }
    if wakes {
        app.wake.notify_one();
    }
    app.counters.repeated.inc_by(done.repeated);
    if let Some(why) = &done.first_reason {
        tracing::warn!(%node, rejected = done.rejected, why, "reports rejected");
    }
    Ok(ReportAck {
        acked_seq: done.acked_seq,
        rejected: done.rejected,
        first_reason: done.first_reason,
        refused: done.refused,
    })
}

/// What every report has, whatever else is in it.
#[derive(Deserialize)]
struct Numbered<'a> {
    #[serde(borrow)]
    seq: Option<&'a RawValue>,
}

fn incoming(batch: LooseBatch<'_>) -> Result<Batch, ApiError> {
    let mut last = 0;
    let mut all = Vec::with_capacity(batch.reports.len());
    for (index, raw) in batch.reports.into_iter().map(RawValue::get).enumerate() {
        let numbered = serde_json::from_str::<Numbered<'_>>(raw).ok().and_then(|report| report.seq);
        let seq = numbered.and_then(|seq| seq.get().parse().ok()).filter(|seq| *seq <= MAX_INTEGER);
        let seq = seq.filter(|s| *s > last).ok_or_else(|| {
            let shown: String = numbered.map_or("absent", RawValue::get).chars().take(MAX_TEXT).collect();
            ApiError::Unprocessable(format!(
                "seq of report {index} is {shown}: a whole number from 1 to {MAX_INTEGER}, above the one before it ({last})"
            ))
        })?;
        last = seq;
        all.push(Incoming { seq, body: report(raw) });
    }
    Ok(Batch { instance: batch.instance, reports: all })
}

fn report(raw: &str) -> Result<ReportBody, Rejected> {
    let malformed = |why: String| Rejected::new(Reason::Malformed, why.chars().take(MAX_TEXT).collect::<String>());
    if raw.len() > MAX_REPORT {
        return Err(malformed(format!("it has {} bytes, at most {MAX_REPORT} are read", raw.len())));
    }
    serde_json::from_str::<Report>(raw).map(|r| r.body).map_err(|e| malformed(e.to_string()))
}

pub(super) async fn orders(State(app): Shared, Path(node): Path<NodeName>) -> Answer<Orders> {
    let mut follower = super::stream::follow(&app, &node).await?;
    let published = follower.borrow_and_update().clone();
    published.map(|p| Json(p.orders.clone())).ok_or_else(|| again(&node))
}
