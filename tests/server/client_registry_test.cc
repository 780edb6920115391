// Leases, by a clock that the test turns.

#include "daemon/server/client_registry.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace wavekv {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr LeaseOptions kOptions{.lease_ms = 1000, .lease_ms_max = 5000, .clients_max = 3};

class ClientRegistryTest : public ::testing::Test {
 protected:
  ClientRegistry::Lease Attach(const TenantId& tenant = "a", uint64_t lease_ms = 0) {
    absl::StatusOr<ClientRegistry::Lease> lease = registry_.Attach(tenant, "test", lease_ms);
    EXPECT_TRUE(lease.ok()) << lease.status();
    return *lease;
  }

  FakeClock clock_;
  ClientRegistry registry_{kOptions, &clock_};
};

TEST_F(ClientRegistryTest, GrantsWhatIsAskedForWithinBounds) {
  struct Row {
    uint64_t asked;
    uint64_t granted;
  };
  for (const Row& row : {Row{0, 1000}, Row{2000, 2000}, Row{1, kLeaseMsMin}}) {
    EXPECT_EQ(Attach("a", row.asked).lease_ms, row.granted) << row.asked;
  }
  EXPECT_EQ(Attach("b", ~0ull).lease_ms, 5000u);
}

TEST_F(ClientRegistryTest, SecretsAndIdsAreUnique) {
  const ClientRegistry::Lease first = Attach();
  const ClientRegistry::Lease second = Attach();
  EXPECT_NE(first.secret, second.secret);
  EXPECT_EQ(first.secret.size(), 16u);
  EXPECT_NE(first.client, second.client);
}

TEST_F(ClientRegistryTest, OnlyTheRightSecretOfTheRightTenantIsKnown) {
  const ClientRegistry::Lease lease = Attach("a");
  EXPECT_TRUE(registry_.Authenticate("a", lease.secret).ok());
  for (const auto& [tenant, secret] :
       std::vector<std::pair<std::string, std::string>>{{"b", lease.secret},  // Of another tenant.
                                                        {"a", std::string(16, '\0')},  // A guess.
                                                        {"a", ""},
                                                        {"a", lease.secret + "x"},
                                                        {"a", lease.secret.substr(1)}}) {
    EXPECT_TRUE(absl::IsUnauthenticated(registry_.Authenticate(tenant, secret).status()));
  }
}

TEST_F(ClientRegistryTest, AnyCallRenewsTheLease) {
  const ClientRegistry::Lease lease = Attach();
  for (int i = 0; i < 5; ++i) {
    clock_.AdvanceMs(999);
    EXPECT_TRUE(registry_.Authenticate("a", lease.secret).ok()) << i;
    EXPECT_THAT(registry_.TakeEnded(), IsEmpty());
  }
  clock_.AdvanceMs(1000);
  EXPECT_TRUE(absl::IsUnauthenticated(registry_.Authenticate("a", lease.secret).status()));
  EXPECT_THAT(registry_.TakeEnded(), ElementsAre(lease.client));
  EXPECT_THAT(registry_.TakeEnded(), IsEmpty());
  EXPECT_EQ(registry_.Count(), 0u);
}

TEST_F(ClientRegistryTest, ARunningCallHoldsTheLease) {
  const ClientRegistry::Lease lease = Attach();
  absl::StatusOr<ClientHold> hold = registry_.Authenticate("a", lease.secret);
  ASSERT_TRUE(hold.ok());
  clock_.AdvanceMs(100'000);
  EXPECT_THAT(registry_.TakeEnded(), IsEmpty());
  EXPECT_TRUE(registry_.Authenticate("a", lease.secret).ok());
  hold->Release();
  EXPECT_THAT(registry_.TakeEnded(), IsEmpty()) << "the lease begins anew when the call ends";
  clock_.AdvanceMs(1000);
  EXPECT_THAT(registry_.TakeEnded(), ElementsAre(lease.client));
}

TEST_F(ClientRegistryTest, AStreamThatOutlivesItsLeaseIsRefused) {
  const ClientRegistry::Lease lease = Attach();
  EXPECT_TRUE(registry_.Resume(lease.client).ok());
  clock_.AdvanceMs(1000);
  EXPECT_TRUE(absl::IsUnauthenticated(registry_.Resume(lease.client).status()));
  registry_.TakeEnded();
  EXPECT_TRUE(absl::IsUnauthenticated(registry_.Resume(lease.client).status()));
}

TEST_F(ClientRegistryTest, ADetachedClientEndsWithItsLastCall) {
  const ClientRegistry::Lease lease = Attach();
  absl::StatusOr<ClientHold> detach = registry_.Authenticate("a", lease.secret);
  absl::StatusOr<ClientHold> create = registry_.Resume(lease.client);
  ASSERT_TRUE(detach.ok() && create.ok());
  registry_.Detach(lease.client);
  EXPECT_TRUE(absl::IsUnauthenticated(registry_.Authenticate("a", lease.secret).status()));
  EXPECT_TRUE(absl::IsUnauthenticated(registry_.Resume(lease.client).status()));
  detach->Release();
  EXPECT_THAT(registry_.TakeEnded(), IsEmpty()) << "a call still runs, which may own something";
  create->Release();
  EXPECT_THAT(registry_.TakeEnded(), ElementsAre(lease.client));
}

TEST_F(ClientRegistryTest, ClientsOfATenantAreBounded) {
  for (int i = 0; i < 3; ++i) Attach("a");
  const absl::Status status = registry_.Attach("a", "one too many", 0).status();
  EXPECT_TRUE(absl::IsResourceExhausted(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("--clients_max"));
  EXPECT_TRUE(registry_.Attach("b", "another tenant", 0).ok());
  using Counts = std::map<TenantId, uint32_t>;
  EXPECT_EQ(registry_.CountByTenant(), (Counts{{"a", 3}, {"b", 1}}));
  clock_.AdvanceMs(1000);
  registry_.TakeEnded();
  EXPECT_EQ(registry_.CountByTenant(), Counts());
  EXPECT_TRUE(registry_.Attach("a", "room again", 0).ok());
}

TEST_F(ClientRegistryTest, NamesAreBoundedAndShown) {
  EXPECT_TRUE(absl::IsInvalidArgument(registry_.Attach("a", std::string(129, 'n'), 0).status()));
  const absl::StatusOr<ClientRegistry::Lease> lease =
      registry_.Attach("a", std::string(128, 'n'), 0);
  ASSERT_TRUE(lease.ok());
  EXPECT_EQ(registry_.NameOf(lease->client), std::string(128, 'n'));
  EXPECT_EQ(registry_.NameOf(ClientId(99)), "");
  EXPECT_EQ(registry_.LeaseMs(lease->client), 1000u);
  EXPECT_EQ(registry_.LeaseMs(ClientId(99)), 0u);
}

}  // namespace
}  // namespace wavekv
