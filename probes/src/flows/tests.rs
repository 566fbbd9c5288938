use super::*;
use proptest::prelude::*;

const LOOK_S: f64 = 0.01;

fn to(last: u8) -> IpAddr {
    [10, 0, 0, last].into()
}

/// A connection with a queue.
fn flow(id: u64, acked: u64) -> Flow {
    Flow { id, peer: to(id as u8), job: true, acked, rtt_s: 0.004, path_s: 0.002 }
}

/// Looks every 10 ms at what `at` says there is after so many looks.
fn watched(looks: usize, at: impl Fn(usize) -> Vec<Flow>) -> Vec<Piece> {
    let mut watch = FlowWatch::default();
    (0..looks).flat_map(|i| watch.look(Nanos(1).plus(LOOK_S * i as f64), &at(i))).collect()
}

/// 100 looks at a stream of 12.5 MB/s, every one changed by `change`.
fn stream(change: impl Fn(usize, &mut Flow)) -> Vec<Piece> {
    watched(100, |i| {
        let mut flow = flow(1, 125_000 * i as u64);
        change(i, &mut flow);
        vec![flow]
    })
}

#[test]
fn an_even_stream_shows_its_rate_again_and_again() {
    let pieces = stream(|_, _| {});
    assert!((4..=5).contains(&pieces.len()), "{pieces:?}");
    for piece in pieces {
        assert_eq!(piece.peer, to(1));
        assert!((piece.bytes as f64 / piece.seconds / 12.5e6 - 1.0).abs() < 1e-6, "{piece:?}");
    }
}

#[test]
fn a_stream_that_ends_within_a_look_shows_its_rate() {
    // 8.3 looks of full rate, and then nothing: the last look sees a third of what the others saw.
    let pieces = watched(30, |i| vec![flow(1, (125_000.0 * (i as f64).min(8.3)) as u64)]);
    assert_eq!(pieces.len(), 1, "{pieces:?}");
    assert!((pieces[0].bytes as f64 / pieces[0].seconds / 12.5e6 - 1.0).abs() < 1e-6, "{pieces:?}");
}

#[test]
fn what_the_link_did_not_hold_up_says_nothing() {
    assert_eq!(stream(|_, flow| flow.rtt_s = 0.0021), vec![], "no queue: the sender had no more to send");
    assert_eq!(stream(|i, flow| flow.acked = 600_000 * (i / 10) as u64), vec![], "a window's worth every round trip");
    assert_eq!(stream(|i, flow| flow.acked = 100 * i as u64), vec![], "too little");
    assert_eq!(watched(3, |i| vec![flow(1, 1_000_000 * i as u64)]), vec![], "too short");
}

#[test]
fn connections_to_one_peer_are_one_stream_and_other_peers_are_company() {
    let same = |i: usize| {
        let second = Flow { peer: to(1), ..flow(2, 62_500 * i as u64) };
        vec![flow(1, 62_500 * i as u64), second]
    };
    let pieces = watched(100, same);
    assert!(pieces.len() >= 4 && pieces.iter().all(|p| p.peer == to(1)), "{pieces:?}");
    assert!((pieces[0].bytes as f64 / pieces[0].seconds / 12.5e6 - 1.0).abs() < 1e-6);
    let company = |i: usize| vec![flow(1, 62_500 * i as u64), flow(2, 62_500 * i as u64)];
    assert_eq!(watched(100, company), vec![], "two links share the way out: neither shows its own rate");
    let upload = |i: usize| {
        let upload = Flow { job: false, ..flow(2, 62_500 * i as u64) };
        vec![flow(1, 62_500 * i as u64), upload]
    };
    assert_eq!(watched(100, upload), vec![], "an upload takes half of the way out");
}

/// 0.8 Mbit/s: 32 KiB take a third of a second.
#[test]
fn a_thin_link_takes_longer_pieces() {
    let pieces = stream(|i, flow| flow.acked = 1000 * i as u64);
    assert_eq!(pieces.len(), 2, "{pieces:?}");
    assert!((pieces[0].bytes as f64 / pieces[0].seconds / 1e5 - 1.0).abs() < 1e-6, "{pieces:?}");
}

#[test]
fn a_connection_that_is_new_or_begins_anew_is_no_burst() {
    let anew = |i: usize| vec![flow(if i < 50 { 1 } else { 101 }, 1_000_000_000 + 125_000 * i as u64)];
    for piece in watched(100, anew) {
        assert!(piece.bytes as f64 / piece.seconds <= 12.5e6 * 1.000001, "{piece:?}");
    }
}

proptest! {
    /// Whatever the kernel says, a piece is something that can have happened.
    #[test]
    fn any_looks_are_survived(
        looks in proptest::collection::vec((0_u64..50_000_000, proptest::collection::vec(
            (0_u64..4, 1_u8..4, any::<u64>(), -1.0_f64..1e9, -1.0_f64..1e9), 0..5)), 0..80),
    ) {
        let (mut watch, mut now) = (FlowWatch::default(), 0);
        for (step, flows) in looks {
            now += step;
            let flows: Vec<Flow> = flows.into_iter().map(|(id, peer, acked, rtt_s, path_s)| {
                Flow { id, peer: to(peer), job: peer < 3, acked: acked >> 20, rtt_s, path_s }
            }).collect();
            for piece in watch.look(Nanos(now), &flows) {
                prop_assert!(piece.seconds >= STREAM_S && piece.bytes >= LEAST_BYTES);
            }
        }
    }
}
