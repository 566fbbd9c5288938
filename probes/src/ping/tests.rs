use super::*;

const COOKIE_BYTES: [u8; COOKIE] = [9; COOKIE];

fn ip(i: u8) -> IpAddr {
    IpAddr::from([10, 0, 0, i])
}

fn run(targets: &[IpAddr], count: u64) -> PingRun {
    let plan = PingPlan { count, interval_s: 1.0, timeout_s: 2.0 };
    PingRun::new(Nanos(0), targets, plan, COOKIE_BYTES).unwrap()
}

fn s(seconds: f64) -> Nanos {
    Nanos((seconds * 1e9) as u64)
}

fn reply(seq: u16) -> EchoReply<'static> {
    EchoReply { id: 0, seq, payload: &[9; COOKIE + 4] }
}

#[test]
fn sends_are_spread_over_the_interval() {
    let mut run = run(&[ip(1), ip(2), ip(3), ip(4), ip(1)], 2);
    let mut sends = Vec::new();
    let mut now = Nanos(0);
    while let Some(next) = run.next_at(now) {
        now = next;
        while let Some(due) = run.due(now) {
            sends.push((now, due.target, due.seq));
        }
    }
    assert_eq!(sends.len(), 8);
    assert_eq!(sends[1], (s(0.2), ip(2), 1));
    assert_eq!(sends[4], (s(1.0), ip(1), 2));
    // Nothing was answered: the run lasts until the last timeout.
    assert!(now >= s(3.6));
    assert!(run.stats(now.plus(2.0)).iter().all(|stats| stats.loss == 1.0 && stats.sent == 2));
}

#[test]
fn replies_count_once_in_time_and_with_the_cookie() {
    let mut run = run(&[ip(1)], 3);
    for second in 0..3 {
        run.due(s(f64::from(second))).unwrap();
    }
    assert!(run.due(s(9.0)).is_none());
    let got = run.reply(s(0.25), ip(1), &reply(1)).unwrap();
    assert_eq!((got.seq, got.rtt_s), (1, 0.25));
    assert!(run.reply(s(0.3), ip(1), &reply(1)).is_none(), "twice");
    assert!(run.reply(s(1.2), ip(2), &reply(2)).is_none(), "another sender");
    assert!(run.reply(s(1.2), ip(1), &reply(7)).is_none(), "a number that was not sent");
    assert!(run.reply(s(1.2), ip(1), &reply(0)).is_none(), "number 0");
    let forged = EchoReply { id: 0, seq: 2, payload: &[8; COOKIE] };
    assert!(run.reply(s(1.2), ip(1), &forged).is_none(), "another cookie");
    assert!(run.reply(s(3.5), ip(1), &reply(2)).is_none(), "too late");
    let stats = &run.stats(s(9.0))[0];
    assert_eq!((stats.sent, stats.answered, stats.duplicates), (3, 1, 1));
    assert_eq!(stats.rtt.unwrap().median_s, 0.25);
}

#[test]
fn plans_are_checked() {
    let good = PingPlan { count: 1, interval_s: 1.0, timeout_s: 1.0 };
    let bad = |plan: PingPlan| PingRun::new(Nanos(0), &[ip(1)], plan, COOKIE_BYTES).is_err();
    assert!(!bad(good));
    assert!(bad(PingPlan { count: 0, ..good }));
    assert!(bad(PingPlan { interval_s: f64::NAN, ..good }));
    assert!(bad(PingPlan { timeout_s: -1.0, ..good }));
    assert!(PingRun::new(Nanos(0), &[], good, COOKIE_BYTES).is_err());
}
