-- The worker's database, version 8: of clients' keys the newest are kept, which are found by this.

alter table claim add column at_ms integer generated always as (body ->> '$.at_ms') virtual;
create index claim_at on claim (at_ms);
