-- The worker's database, version 2: what the node publishes to the catalog, in the commit of the change that it shows.

create table published (
  id text primary key, body text not null,
  tier text generated always as (body ->> '$.tier') virtual,
  number integer generated always as (body ->> '$.number') virtual,
  at_ms integer generated always as (body ->> '$.at_ms') virtual,
  gone integer generated always as (body ->> '$.values' is null) virtual
) without rowid;
create index published_number on published (tier, number);
create index published_gone on published (tier, number) where gone;

create table due (
  id text primary key, body text not null,
  tier text generated always as (body ->> '$.tier') virtual,
  since_ms integer generated always as (body ->> '$.since_ms') virtual
) without rowid;

create table log_head (id text primary key, body text not null) without rowid;
